// Operators whose chunk is part of the model: the memory that a token's update reads is the one that its
// chunk began with. Two nested loops in one interface, and what backward holds of them.
#pragma once

#include <memory>

#include "chunks.h"
#include "recompute.h"

namespace girih {

// One operator's rule on n neighbouring chunks, made from its inputs [B, n, H, C, ...].
struct Block {
  virtual ~Block() = default;
  // The states after chunk c = 0..n-1, in turn; keeps what `read` needs of it.
  virtual Chunks::States step(int64_t c, const Chunks::States& states) = 0;
  // Every output of the n chunks at once, [B, n, HQ, C, ...]; `starts` are the states before each chunk, [B,
  // n, ...].
  virtual Tensor read(const Tensors& starts) = 0;
};

// complete: [B, n], the chunk's last token is read in it; undefined where that holds for all.
using MakeBlock = std::function<std::unique_ptr<Block>(const Tensors& inputs, const Tensor& complete)>;

class DefiningChunks {
 public:
  DefiningChunks(const Tensor& like, int64_t B, int64_t T, int64_t C, const OptionalTensor& cu_seqlens,
                 const OptionalTensor& position);

  // Every chunk begins and ends among these tokens, so that no state stands within one.
  bool whole() const { return whole_; }

  struct Run {
    Tensor o;  // [B, T, HQ, ...] in `dtype`; undefined when there is no token
    Chunks::States finals;
  };
  // inputs [B, T, H, ...]; undefined ones stay so.
  Run run(const Tensors& inputs, const Chunks::States& initial, const MakeBlock& make,
          at::ScalarType dtype) const;

  // [N]: the position after the last token, 0..C-1.
  Tensor next_position() const { return chunks_.next_position().remainder(C_); }

 private:
  int64_t C_, n_;  // a block is n chunks
  bool whole_;
  Chunks chunks_;
};

// [B, n, ...] -> n times [B, ...], each contiguous.
inline Tensors per_chunk(const Tensor& x) { return x.transpose(0, 1).contiguous().unbind(0); }

// A flag [B] for each row, against its state [B, ...].
Tensor where_row(const Tensor& flag, const Tensor& state, const Tensor& otherwise);

}  // namespace girih

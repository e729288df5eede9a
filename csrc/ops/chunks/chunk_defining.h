// Operators whose chunk is part of the model: the update of a token reads the memory at the start of its
// chunk. A scan over blocks of chunks contains a loop over the chunks of a block.
#pragma once

#include <memory>

#include "chunks.h"
#include "recompute.h"

namespace girih {

// The rule of one operator on n consecutive chunks, built from its inputs [B, n, H, C, ...].
struct Block {
  virtual ~Block() = default;
  // Returns the states after chunk c; called for c = 0..n-1 in order. Stores what `read` needs of the chunk.
  virtual Chunks::States step(int64_t c, const Chunks::States& states) = 0;
  // Returns the outputs of the n chunks, [B, n, HQ, C, ...]; `starts` are the states before each chunk, [B,
  // n, ...].
  virtual Tensor read(const Tensors& starts) = 0;
};

// complete [B, n]: the last token of the chunk is one of these tokens; undefined if that holds for all
// chunks.
using MakeBlock = std::function<std::unique_ptr<Block>(const Tensors& inputs, const Tensor& complete)>;

class DefiningChunks {
 public:
  DefiningChunks(const Tensor& like, int64_t B, int64_t T, int64_t C, const OptionalTensor& cu_seqlens,
                 const OptionalTensor& position);

  // All chunks begin and end within these tokens, so that no state is inside a chunk.
  bool whole() const { return whole_; }

  struct Run {
    Tensor o;  // [B, T, HQ, ...] in `dtype`; undefined without tokens
    Chunks::States finals;
  };
  // inputs [B, T, H, ...]; an undefined input is passed to the blocks as undefined.
  Run run(const Tensors& inputs, const Chunks::States& initial, const MakeBlock& make,
          at::ScalarType dtype) const;

  // [N]: the position after the last token, 0..C-1.
  Tensor next_position() const { return chunks_.next_position().remainder(C_); }

 private:
  int64_t C_, n_;  // tokens of a chunk, chunks of a block
  bool whole_;
  Chunks chunks_;
};

// [B, n, ...] -> n tensors [B, ...], each contiguous.
inline Tensors per_chunk(const Tensor& x) { return x.transpose(0, 1).contiguous().unbind(0); }

// Selects by the flag [B] between rows of two tensors [B, ...].
Tensor where_row(const Tensor& flag, const Tensor& state, const Tensor& otherwise);

}  // namespace girih

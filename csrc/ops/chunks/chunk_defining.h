// The scan of models whose chunk is a parameter (trellis, ttt, lattice): the update of a token reads the
// memory at the start of its chunk. A scan over blocks of chunks contains a loop over the chunks of a block.
#pragma once

#include <memory>

#include "checkpoint.h"
#include "chunks.h"

namespace girih {

// The rule of one operator on n consecutive chunks, built from its inputs [B, n, H, C, ...].
struct ChunkBlock {
  virtual ~ChunkBlock() = default;
  // Returns the states after chunk c; called for c = 0..n-1 in order. Stores what `read` needs of the chunk.
  virtual Chunks::States step(int64_t c, const Chunks::States& states) = 0;
  // Returns the outputs of the n chunks, [B, n, HQ, C, ...]; `starts` are the states before each chunk, [B,
  // n, ...].
  virtual Tensor read(const Tensors& starts) = 0;
};

// has_chunk_end [B, n]: the last token of the chunk is one of these tokens; undefined if that holds for all
// chunks.
using MakeChunkBlock =
    std::function<std::unique_ptr<ChunkBlock>(const Tensors& inputs, const Tensor& has_chunk_end)>;

// For models whose chunk length is a parameter.
class ChunkDefiningScan {
 public:
  ChunkDefiningScan(const Tensor& x, int64_t B, int64_t T, int64_t C, const OptionalTensor& cu_seqlens,
                    const OptionalTensor& position);

  // All chunks begin and end within these tokens, so that no state is inside a chunk.
  bool has_whole_chunks() const { return has_whole_chunks_; }

  struct Run {
    Tensor o;  // [B, T, HQ, ...] in `dtype`; undefined without tokens
    Chunks::States finals;
  };
  // inputs [B, T, H, ...]; an undefined input is passed to the blocks as undefined.
  Run run(const Tensors& inputs, const Chunks::States& initial, const MakeChunkBlock& make,
          at::ScalarType dtype) const;

  // [N]: the position after the last token, 0..C-1.
  Tensor next_position() const { return chunks_.next_position().remainder(C_); }

 private:
  int64_t C_, n_;  // tokens of a chunk, chunks of a block
  bool has_whole_chunks_;
  Chunks chunks_;
};

// [B, n, ...] -> n tensors [B, ...], each contiguous.
inline Tensors unbind_chunks(const Tensor& x) { return x.transpose(0, 1).contiguous().unbind(0); }

// Selects by the flag [B] between rows of two tensors [B, ...].
Tensor select_rows(const Tensor& flag, const Tensor& state, const Tensor& otherwise);

}  // namespace girih

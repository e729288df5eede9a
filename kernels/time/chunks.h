// Chunks that are part of a model: a sequence is cut into chunks from its first token, or from `position`
// tokens before it if an earlier call has read the first `position` tokens of the first chunk.
#pragma once

#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kMaxChunk = 64;  // tokens

// The division of sequences into chunks.
struct ChunkGrid {
  SequenceLayout tokens;
  int size;                 // C, 1..kMaxChunk
  const int64_t* position;  // [N]: tokens of the first chunk that earlier calls have read; null: 0
};

// A chunk has an index in its sequence and a number among the chunks of all sequences (tile/sequence.h). The
// chunks of a sequence have consecutive numbers, and some numbers have no tokens. A sequence of n tokens
// touches ceil(n / C) chunks, or at most (n - 2) / C + 2 if it may begin within a chunk. chunks_in_row and
// chunk_count bound the chunks of a batch row and all chunk numbers; they depend on sizes only.
__host__ __device__ inline int64_t chunks_in_row(const ChunkGrid& grid) {
  return (grid.tokens.tokens + (grid.position == nullptr ? 1 : 2) * (grid.size - 1)) / grid.size;
}
__host__ __device__ inline int64_t chunk_count(const ChunkGrid& grid) {
  const SequenceLayout& layout = grid.tokens;
  if (!is_packed(layout)) return layout.batch * chunks_in_row(grid);
  return layout.tokens / grid.size + (grid.position == nullptr ? 1 : 2) * layout.sequences;
}

// A sequence and its chunks.
struct ChunkedSequence {
  Sequence sequence;
  int prior_tokens;  // tokens of the first chunk that earlier calls have read
  int64_t chunks;    // chunks that the sequence touches
  int64_t first;     // number of the first chunk
};

__device__ inline ChunkedSequence chunked_sequence(const ChunkGrid& grid, int64_t index) {
  const Sequence sequence = sequence_at(grid.tokens, index);
  const int prior_tokens =
      grid.position == nullptr ? 0 : static_cast<int>(clamp(grid.position[index], 0, grid.size - 1));
  const int64_t length = sequence.end - sequence.start;
  const int64_t first = is_packed(grid.tokens)
                            ? sequence.start / grid.size + (grid.position == nullptr ? 1 : 2) * index
                            : index * chunks_in_row(grid);
  return {sequence, prior_tokens, length == 0 ? 0 : (prior_tokens + length + grid.size - 1) / grid.size,
          first};
}

struct Chunk {
  int64_t start;     // first token
  int length;        // tokens, 0..C
  bool is_complete;  // the sequence reaches the end of the chunk
};

// Chunk i of a sequence; a chunk without tokens for i >= chunked.chunks.
__device__ inline Chunk chunk_of(const ChunkGrid& grid, const ChunkedSequence& chunked, int64_t i) {
  const int64_t from = chunked.sequence.start - chunked.prior_tokens + i * grid.size, to = from + grid.size;
  const int64_t start = from < chunked.sequence.start ? chunked.sequence.start : from;
  const int64_t end = to < chunked.sequence.end ? to : chunked.sequence.end;
  return {start, static_cast<int>(end > start ? end - start : 0), to <= chunked.sequence.end};
}

// The sequence that the chunk with a given number belongs to, and the index of the chunk in the sequence.
struct NumberedChunk {
  ChunkedSequence of;
  int64_t index;
};
__device__ inline NumberedChunk chunk_at(const ChunkGrid& grid, int64_t number) {
  int64_t n;
  if (!is_packed(grid.tokens)) {
    n = static_cast<uint32_t>(number) / static_cast<uint32_t>(chunks_in_row(grid));
  } else {
    const int64_t extra = grid.position == nullptr ? 1 : 2;
    int64_t low = 0,
            high = grid.tokens.sequences - 1;  // find the last n whose first chunk is at most `number`
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (boundary(grid.tokens, middle) / grid.size + extra * middle <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    n = low;
  }
  const ChunkedSequence of = chunked_sequence(grid, n);
  return {of, number - of.first};
}

}  // namespace girih::kernels

// Chunks that are part of a model: a sequence is cut into chunks from its first token, or from `position`
// tokens before it if an earlier call has read the first `position` tokens of the first chunk.
#pragma once

#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kMostChunk = 64;  // tokens

struct ChunkGrid {
  Tokens tokens;
  int size;                 // C, 1..kMostChunk
  const int64_t* position;  // [N]: tokens of the first chunk that earlier calls have read; null: 0
};

// Chunk numbers have a bound that depends on sizes only. The chunks of a sequence have consecutive numbers,
// and some numbers have no tokens. A sequence of n tokens touches ceil(n / C) chunks, or at most (n - 2) / C
// + 2 if it may begin within a chunk.
__host__ __device__ inline int64_t chunks_in_row(const ChunkGrid& grid) {
  return (grid.tokens.tokens + (grid.position == nullptr ? 1 : 2) * (grid.size - 1)) / grid.size;
}
__host__ __device__ inline int64_t chunk_count(const ChunkGrid& grid) {
  const Tokens& all = grid.tokens;
  if (!is_packed(all)) return all.batch * chunks_in_row(grid);
  return all.tokens / grid.size + (grid.position == nullptr ? 1 : 2) * all.sequences;
}

// A sequence and its chunks.
struct ChunkedSequence {
  Sequence sequence;
  int begun;       // tokens of the first chunk that earlier calls have read
  int64_t chunks;  // chunks that the sequence touches
  int64_t first;   // number of the first chunk
};

__device__ inline ChunkedSequence chunked_sequence(const ChunkGrid& grid, int64_t index) {
  const Sequence sequence = sequence_at(grid.tokens, index);
  const int begun =
      grid.position == nullptr ? 0 : static_cast<int>(clamp(grid.position[index], 0, grid.size - 1));
  const int64_t length = sequence.end - sequence.start;
  const int64_t first = is_packed(grid.tokens)
                            ? sequence.start / grid.size + (grid.position == nullptr ? 1 : 2) * index
                            : index * chunks_in_row(grid);
  return {sequence, begun, length == 0 ? 0 : (begun + length + grid.size - 1) / grid.size, first};
}

struct Chunk {
  int64_t start;  // first token
  int length;     // tokens, 0..C
  bool complete;  // has the last token of the chunk
};

// Chunk i of a sequence; a chunk without tokens for i >= of.chunks.
__device__ inline Chunk chunk_of(const ChunkGrid& grid, const ChunkedSequence& of, int64_t i) {
  const int64_t from = of.sequence.start - of.begun + i * grid.size, to = from + grid.size;
  const int64_t start = from < of.sequence.start ? of.sequence.start : from;
  const int64_t end = to < of.sequence.end ? to : of.sequence.end;
  return {start, static_cast<int>(end > start ? end - start : 0), to <= of.sequence.end};
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

// Work of a block of the scan or of reverse: which tokens of which columns of which state.
#pragma once

#include <algorithm>

#include "delta_product/delta_product.h"
#include "delta_product/pass.h"
#include "tile/grid.h"
#include "tile/matrix.h"
#include "tile/pack.h"

namespace girih::kernels::delta_product {

// Divides by the chunks of a sequence; not used for packed sequences.
inline Divider chunks_of_each(const DeltaShape& shape) {
  return Divider(std::max<int64_t>(divide_up(shape.tokens.tokens, delta_chunk(shape.n)), 1));
}
// Same as piece_at(); for sequences that are not packed without 64-bit division. The divider has the chunks
// of a sequence.
__device__ inline Piece chunk_at(const Tokens& all, int64_t number, int tokens, const Divider& each) {
  if (is_packed(all)) return piece_at(all, number, tokens);
  const uint32_t row = each.divide(static_cast<uint32_t>(number));
  const Sequence sequence = sequence_at(all, row);
  const int64_t index = static_cast<uint32_t>(number) - row * each.by,
                start = sequence.start + index * tokens;
  return {sequence, index, start, static_cast<int>(clamp(sequence.end - start, 0, tokens))};
}

struct Part {
  Piece piece;
  int64_t number;  // index of the initial and final state
  int64_t chunk;   // index of the first chunk
  int head, col;   // head; first column
  int chunks;
  bool transition;
  bool opens, last;  // first and last segment of the sequence in the order of the scan
};

// Reverse uses the transposed transitions that the scan has saved.
__host__ __device__ inline bool makes_transitions(const Walk& walk) { return walk.alone && !walk.reverse; }

// Groups of 64 columns of a state, and of its transition; each group is the work of one state warpgroup.
__host__ __device__ inline int groups_of(int cols) { return (cols + kScanColumns - 1) / kScanColumns; }
__host__ __device__ inline int groups_of(const DeltaShape& shape, const Walk& walk) {
  return groups_of(shape.V) + (makes_transitions(walk) ? groups_of(shape.D) : 0);
}

// True if each block has 64 columns of the state and 64 columns of the transition. The transition has no
// values, so blocks with one group of each kind take equally long (1 x 32768 tokens, 8 heads of 128: 219 us
// instead of 227).
__device__ inline bool pairs_transitions(const DeltaShape& shape, const Walk& walk, int of) {
  return makes_transitions(walk) && of == 2 && groups_of(shape.V) == groups_of(shape.D);
}

// Fills the work of group `which` of the `of` groups of a block. Returns false if that group does not exist;
// then no later group of the block exists.
__device__ inline bool part_of(const DeltaShape& shape, const Walk& walk, unsigned block, Part& part,
                               int which = 0, int of = 1) {
  const int values = groups_of(shape.V), groups = groups_of(shape, walk), blocks = (groups + of - 1) / of;
  const unsigned job = block / blocks, number = walk.heads.divide(job);
  const int group = static_cast<int>(block - job * blocks) * of + which;
  if (group >= groups) return false;
  part.head = static_cast<int>(job - number * walk.heads.by);
  part.number = number;
  const bool pairs = pairs_transitions(shape, walk, of);
  part.transition = pairs ? which == 1 : group >= values;
  part.col = (pairs ? group / 2 : part.transition ? group - values : group) * kScanColumns;
  bool starts = true, ends = true;
  if (shape.tokens.cu_seqlens == nullptr) {
    // The whole block waits for this result. Avoiding the 64-bit divisions of the other branch saves 0.5 us.
    const unsigned sequence = walk.segments.divide(number), index = number - sequence * walk.segments.by;
    const int64_t before = index * walk.segment_chunks;
    part.piece = {sequence_at(shape.tokens, sequence), index, index * walk.segment, 0};
    part.chunks = static_cast<int>(min(walk.segment_chunks, walk.chunks - before));
    part.chunk = sequence * walk.chunks + before;
    starts = index == 0, ends = index + 1 == walk.segments.by;
  } else {
    const int tokens = delta_chunk(shape.n);
    int64_t length;
    if (walk.segment == 0) {
      const Sequence sequence = sequence_at(shape.tokens, number);
      part.piece = {sequence, 0, sequence.start, 0};
      length = sequence.end - sequence.start;
    } else {
      part.piece = piece_at(shape.tokens, number, walk.segment);
      length = part.piece.length;
      if (length == 0 && part.piece.index != 0) return false;
      starts = part.piece.index == 0, ends = part.piece.start + length == part.piece.sequence.end;
    }
    part.chunks = static_cast<int>((length + tokens - 1) / tokens);
    part.chunk = first_piece(shape.tokens, part.piece.sequence, tokens) +
                 (part.piece.start - part.piece.sequence.start) / tokens;
  }
  part.opens = walk.reverse ? ends : starts;
  part.last = walk.reverse ? starts : ends;
  return !(walk.alone && (part.last || (part.transition && part.opens)));
}

// Blocks of a launch; each block has `of` groups of columns.
inline int64_t blocks_of(const DeltaShape& shape, const Walk& walk, int of = 1) {
  const int64_t pieces = walk.segment == 0 ? shape.tokens.sequences : piece_count(shape.tokens, walk.segment);
  return pieces * shape.heads * divide_up(groups_of(shape, walk), of);
}

// Groups of columns that a launch with `alone` does not skip, if every sequence has two segments or more.
inline int64_t parts_alone(const DeltaShape& shape, const Walk& walk) {
  const int left_out = groups_of(shape.V) + 2 * groups_of(shape.D);
  return blocks_of(shape, walk) - shape.tokens.sequences * shape.heads * left_out;
}

// Tokens of chunk c of the block.
__device__ inline int tokens_in(const Part& part, int tokens, int c) {
  const int64_t left = part.piece.sequence.end - part.piece.start - static_cast<int64_t>(c) * tokens;
  return left < tokens ? static_cast<int>(left) : tokens;
}

// Row `col` of the transposed state of a chunk: [chunks, H, V, D].
template <typename T, typename Number>
__device__ inline T* state_at(T* states, const DeltaShape& shape, Number number, int col) {
  return states + (number * shape.V + col) * shape.D;
}
template <typename T>
__device__ inline T* state_at(T* states, const DeltaShape& shape, int64_t chunk, int head, int col) {
  return state_at(states, shape, chunk * shape.heads + head, col);
}

}  // namespace girih::kernels::delta_product

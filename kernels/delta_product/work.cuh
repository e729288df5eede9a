// Work of a block of the scan or of reverse: which tokens of which columns of which state.
#pragma once

#include <algorithm>

#include "delta_product/delta_product.h"
#include "delta_product/params.h"
#include "tile/grid.h"
#include "tile/matrix.h"
#include "tile/pack.h"

namespace girih::kernels::delta_product {

// Divides by the chunks of a sequence; not used for packed sequences.
inline Divider make_chunk_divider(const DeltaShape& shape) {
  return Divider(std::max<int64_t>(divide_up(shape.tokens.tokens, delta_chunk_tokens(shape.n)), 1));
}
// Same as token_range_at(); for sequences that are not packed without 64-bit division. The divider has the
// chunks of a sequence.
__device__ inline TokenRange chunk_at(const SequenceLayout& all, int64_t number, int tokens,
                                      const Divider& sequence_chunks) {
  if (is_packed(all)) return token_range_at(all, number, tokens);
  const uint32_t row = sequence_chunks.divide(static_cast<uint32_t>(number));
  const Sequence sequence = sequence_at(all, row);
  const int64_t index = static_cast<uint32_t>(number) - row * sequence_chunks.by,
                start = sequence.start + index * tokens;
  return {sequence, index, start, static_cast<int>(clamp(sequence.end - start, 0, tokens))};
}

struct BlockWork {
  TokenRange range;
  int64_t state_index;  // index of the initial and final state
  int64_t first_chunk;  // index of the first chunk
  int head, col;        // head; first column
  int chunks;
  bool is_transition;
  bool is_first, is_last;  // first and last segment of the sequence in the order of the scan
};

// Reverse uses the transposed transitions that the scan has saved.
__host__ __device__ inline bool has_transitions(const ScanGrid& grid) {
  return grid.is_local && !grid.reverse;
}

// Groups of 64 columns of a state, and of its transition; each group is the work of one state warpgroup.
__host__ __device__ inline int column_groups(int cols) { return (cols + kScanColumns - 1) / kScanColumns; }
__host__ __device__ inline int column_groups(const DeltaShape& shape, const ScanGrid& grid) {
  return column_groups(shape.V) + (has_transitions(grid) ? column_groups(shape.D) : 0);
}

// True if each block has 64 columns of the state and 64 columns of the transition. The transition has no
// values, so blocks with one group of each kind take equally long (1 x 32768 tokens, 8 heads of 128: 219 us
// instead of 227).
__device__ inline bool has_paired_transition(const DeltaShape& shape, const ScanGrid& grid,
                                             int groups_per_block) {
  return has_transitions(grid) && groups_per_block == 2 && column_groups(shape.V) == column_groups(shape.D);
}

// Fills the work of group `which` of the `of` groups of a block. Returns false if that group does not exist;
// then no later group of the block exists.
__device__ inline bool find_work(const DeltaShape& shape, const ScanGrid& grid, unsigned block,
                                 BlockWork& work, int which = 0, int groups_per_block = 1) {
  const int values = column_groups(shape.V), groups = column_groups(shape, grid),
            blocks = (groups + groups_per_block - 1) / groups_per_block;
  const unsigned job = block / blocks, number = grid.heads.divide(job);
  const int group = static_cast<int>(block - job * blocks) * groups_per_block + which;
  if (group >= groups) return false;
  work.head = static_cast<int>(job - number * grid.heads.by);
  work.state_index = number;
  const bool pairs = has_paired_transition(shape, grid, groups_per_block);
  work.is_transition = pairs ? which == 1 : group >= values;
  work.col = (pairs ? group / 2 : work.is_transition ? group - values : group) * kScanColumns;
  bool starts = true, ends = true;
  if (shape.tokens.cu_seqlens == nullptr) {
    // The whole block waits for this result. Avoiding the 64-bit divisions of the other branch saves 0.5 us.
    const unsigned sequence = grid.segments.divide(number), index = number - sequence * grid.segments.by;
    const int64_t before = index * grid.segment_chunks;
    work.range = {sequence_at(shape.tokens, sequence), index, index * grid.segment, 0};
    work.chunks = static_cast<int>(min(grid.segment_chunks, grid.chunks - before));
    work.first_chunk = sequence * grid.chunks + before;
    starts = index == 0, ends = index + 1 == grid.segments.by;
  } else {
    const int tokens = delta_chunk_tokens(shape.n);
    int64_t length;
    if (grid.segment == 0) {
      const Sequence sequence = sequence_at(shape.tokens, number);
      work.range = {sequence, 0, sequence.start, 0};
      length = sequence.end - sequence.start;
    } else {
      work.range = token_range_at(shape.tokens, number, grid.segment);
      length = work.range.length;
      if (length == 0 && work.range.index != 0) return false;
      starts = work.range.index == 0, ends = work.range.start + length == work.range.sequence.end;
    }
    work.chunks = static_cast<int>((length + tokens - 1) / tokens);
    work.first_chunk = first_token_range(shape.tokens, work.range.sequence, tokens) +
                       (work.range.start - work.range.sequence.start) / tokens;
  }
  work.is_first = grid.reverse ? ends : starts;
  work.is_last = grid.reverse ? starts : ends;
  return !(grid.is_local && (work.is_last || (work.is_transition && work.is_first)));
}

// Blocks of a launch; each block has `of` groups of columns.
inline int64_t block_count(const DeltaShape& shape, const ScanGrid& grid, int groups_per_block = 1) {
  const int64_t ranges =
      grid.segment == 0 ? shape.tokens.sequences : token_range_count(shape.tokens, grid.segment);
  return ranges * shape.heads * divide_up(column_groups(shape, grid), groups_per_block);
}

// Groups of columns that a launch with `is_local` does not skip, if every sequence has two segments or more.
inline int64_t count_local_groups(const DeltaShape& shape, const ScanGrid& grid) {
  const int left_out = column_groups(shape.V) + 2 * column_groups(shape.D);
  return block_count(shape, grid) - shape.tokens.sequences * shape.heads * left_out;
}

// Tokens of chunk c of the block.
__device__ inline int chunk_length(const BlockWork& work, int tokens, int c) {
  const int64_t left = work.range.sequence.end - work.range.start - static_cast<int64_t>(c) * tokens;
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

// Work of a block of the scan or of reverse: which tokens of which columns of which state.
#pragma once

#include <algorithm>

#include "delta_product/kernels.h"
#include "delta_product/params.h"
#include "tile/grid.h"
#include "tile/matrix.h"
#include "tile/pack.h"

namespace girih::kernels::delta_product {

// Divides by the number of chunks of a sequence; not used for packed sequences.
inline Divider make_chunk_divider(const DeltaShape& shape) {
  return Divider(std::max<int64_t>(divide_up(shape.tokens.tokens, delta_chunk_tokens(shape.n)), 1));
}
// Chunk `number` of all sequences, as token_range_at() computes it. Without packed sequences the divider
// `sequence_chunks` (make_chunk_divider()) replaces the 64-bit division of token_range_at().
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
  TokenRange range;  // the sequence, or the segment; `length` is not read
  // Index of the range among all sequences, or all segments. With segments, a launch with `is_local` reads
  // the initial state by sequence and writes the final state by segment; the last launch does the opposite.
  int64_t range_index;
  int64_t first_chunk;  // index of the first chunk of the range among all chunks
  int head;
  int col;  // first column of V, or of the transition if `is_transition`
  int chunks;
  bool is_transition;      // the columns are columns of the transition instead of the state
  bool is_first, is_last;  // first and last segment of the sequence in the order of the launch
};

// True if the launch computes transitions. Reverse does not: its transitions are the transposes of those that
// the scan has saved.
__host__ __device__ inline bool has_transitions(const ScanGrid& grid) {
  return grid.is_local && !grid.reverse;
}

// Groups of 64 columns of a state, and of its transition; a group is the work of one state warpgroup.
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

// Fills the work of group `group_in_block` of the `groups_per_block` groups of a block. The groups of a head
// are those of the state, then those of the transition. Returns false if the group has no work, and then no
// later group of the block has any: the group does not exist, the segment has no tokens (cu_seqlens),
// or `is_local` skips it.
__device__ inline bool find_work(const DeltaShape& shape, const ScanGrid& grid, unsigned block,
                                 BlockWork& work, int group_in_block = 0, int groups_per_block = 1) {
  const int state_groups = column_groups(shape.V), groups = column_groups(shape, grid),
            head_blocks = (groups + groups_per_block - 1) / groups_per_block;
  const unsigned range_and_head = block / head_blocks, number = grid.head_divider.divide(range_and_head);
  const int group =
      static_cast<int>(block - range_and_head * head_blocks) * groups_per_block + group_in_block;
  if (group >= groups) return false;
  work.head = static_cast<int>(range_and_head - number * grid.head_divider.by);
  work.range_index = number;
  const bool is_paired = has_paired_transition(shape, grid, groups_per_block);
  work.is_transition = is_paired ? group_in_block == 1 : group >= state_groups;
  work.col = (is_paired ? group / 2 : work.is_transition ? group - state_groups : group) * kScanColumns;
  bool starts = true, ends = true;
  if (shape.tokens.cu_seqlens == nullptr) {
    // The whole block waits for this result. Avoiding the 64-bit divisions of the other branch saves 0.5 us.
    const unsigned sequence = grid.segment_divider.divide(number),
                   index = number - sequence * grid.segment_divider.by;
    const int64_t chunks_before = index * grid.segment_chunks;
    work.range = {sequence_at(shape.tokens, sequence), index, index * grid.segment_tokens, 0};
    work.chunks = static_cast<int>(min(grid.segment_chunks, grid.chunks - chunks_before));
    work.first_chunk = sequence * grid.chunks + chunks_before;
    starts = index == 0, ends = index + 1 == grid.segment_divider.by;
  } else {
    const int tokens = delta_chunk_tokens(shape.n);
    int64_t length;
    if (grid.segment_tokens == 0) {
      const Sequence sequence = sequence_at(shape.tokens, number);
      work.range = {sequence, 0, sequence.start, 0};
      length = sequence.end - sequence.start;
    } else {
      work.range = token_range_at(shape.tokens, number, grid.segment_tokens);
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

// Blocks of a launch; each block has `groups_per_block` groups of columns.
inline int64_t block_count(const DeltaShape& shape, const ScanGrid& grid, int groups_per_block = 1) {
  const int64_t ranges = grid.segment_tokens == 0 ? shape.tokens.sequences
                                                  : token_range_count(shape.tokens, grid.segment_tokens);
  return ranges * shape.heads * divide_up(column_groups(shape, grid), groups_per_block);
}

// Groups of columns that a launch with `is_local` does not skip, if every sequence has two segments or more:
// of a sequence and head, all groups of the last segment and the transition of the first are skipped.
inline int64_t count_local_groups(const DeltaShape& shape, const ScanGrid& grid) {
  const int skipped_groups = column_groups(shape.V) + 2 * column_groups(shape.D);
  return block_count(shape, grid) - shape.tokens.sequences * shape.heads * skipped_groups;
}

// Tokens of chunk c of the block.
__device__ inline int chunk_length(const BlockWork& work, int tokens, int c) {
  const int64_t left = work.range.sequence.end - work.range.start - static_cast<int64_t>(c) * tokens;
  return left < tokens ? static_cast<int>(left) : tokens;
}

// Row `col` of the transposed state of a chunk, in [chunks, H, V, D]; `number` is chunk * H + head.
template <typename T, typename Number>
__device__ inline T* state_at(T* states, const DeltaShape& shape, Number number, int col) {
  return states + (number * shape.V + col) * shape.D;
}
template <typename T>
__device__ inline T* state_at(T* states, const DeltaShape& shape, int64_t chunk, int head, int col) {
  return state_at(states, shape, chunk * shape.heads + head, col);
}

}  // namespace girih::kernels::delta_product

// Sequences of a batch in three forms: every row is a sequence; cu_seqlens packs several sequences into one
// row; or every row has one sequence between two bounds in cu_seqlens.
#pragma once

#include <cstdint>

namespace girih::kernels {

struct SequenceLayout {
  int64_t batch;           // batch rows; 1 if packed
  int64_t tokens;          // T, tokens of a batch row
  int64_t sequences;       // N: batch rows, or packed sequences
  const void* cu_seqlens;  // [N + 1], or with `has_bounds` [batch, 2]; null: every row is a sequence
  bool is_int64;           // cu_seqlens is int64, else int32
  bool has_bounds;
};

// Whether one row holds several sequences.
__host__ __device__ inline bool is_packed(const SequenceLayout& layout) {
  return layout.cu_seqlens != nullptr && !layout.has_bounds;
}

struct Sequence {
  int64_t index;  // row of the state, 0..N-1
  int64_t batch;  // batch row of the tokens
  int64_t start;  // first token
  int64_t end;    // one past the last token
  bool is_owned;  // false: the tokens belong to no sequence
};

__device__ inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Entry n of cu_seqlens, clamped to 0..tokens so that invalid contents stay in bounds.
__device__ inline int64_t boundary(const SequenceLayout& layout, int64_t n) {
  const int64_t value = layout.is_int64 ? static_cast<const int64_t*>(layout.cu_seqlens)[n]
                                        : static_cast<const int32_t*>(layout.cu_seqlens)[n];
  return clamp(value, 0, layout.tokens);
}

__device__ inline Sequence sequence_at(const SequenceLayout& layout, int64_t index) {
  if (layout.cu_seqlens == nullptr) return {index, index, 0, layout.tokens, true};
  if (layout.has_bounds) {
    const int64_t start = boundary(layout, 2 * index);
    return {index, index, start, clamp(boundary(layout, 2 * index + 1), start, layout.tokens), true};
  }
  const int64_t start = boundary(layout, index);
  return {index, 0, start, clamp(boundary(layout, index + 1), start, layout.tokens), true};
}

// The sequence of a token. start <= token < end holds for any contents of cu_seqlens, so that a loop over
// sequences terminates and accesses between start and end lie in the tensor.
__device__ inline Sequence sequence_of(const SequenceLayout& layout, int64_t batch, int64_t token) {
  if (layout.cu_seqlens == nullptr) return {batch, batch, 0, layout.tokens, true};
  if (layout.has_bounds) {
    const Sequence row = sequence_at(layout, batch);
    if (token < row.start) return {batch, batch, token, row.start, false};
    if (token >= row.end) return {batch, batch, token, layout.tokens, false};
    return row;
  }
  int64_t low = 0, high = layout.sequences;  // the first n with cu_seqlens[n + 1] > token
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (boundary(layout, middle + 1) > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == layout.sequences) return {low, 0, token, layout.tokens, false};
  const int64_t start = boundary(layout, low);
  if (start > token) return {low, 0, token, start, false};
  return {low, 0, start, boundary(layout, low + 1), true};
}

constexpr int kChunk = 64;  // tokens

// Sequences cut into ranges of `size` tokens: chunks, or segments of a scan. A range has an index in its
// sequence and a number among the ranges of all sequences. Sequence n of a packed row has the numbers from
// start / size + n, at least as many as it has ranges. Some numbers have a range without tokens. So
// token_range_count, a bound of the numbers, depends on sizes only, and the host need not read cu_seqlens.
__host__ __device__ inline int64_t token_range_count(const SequenceLayout& layout, int64_t size) {
  return is_packed(layout) ? layout.tokens / size + layout.sequences
                           : layout.batch * ((layout.tokens + size - 1) / size);
}

struct TokenRange {
  Sequence sequence;
  int64_t index;  // in the sequence
  int64_t start;  // first token
  int length;     // tokens, 0..size
};

// The number of the first range of a sequence.
__device__ inline int64_t first_token_range(const SequenceLayout& layout, const Sequence& sequence,
                                            int64_t size) {
  return is_packed(layout) ? sequence.start / size + sequence.index
                           : sequence.index * ((layout.tokens + size - 1) / size);
}

__device__ inline TokenRange token_range_at(const SequenceLayout& layout, int64_t number, int64_t size) {
  Sequence sequence;
  if (!is_packed(layout)) {
    // A 32-bit division costs a third of a 64-bit one, and the numbers are block indices.
    const auto ranges_per_row = static_cast<uint32_t>((layout.tokens + size - 1) / size);
    sequence = sequence_at(layout, static_cast<uint32_t>(number) / ranges_per_row);
  } else {
    int64_t low = 0, high = layout.sequences - 1;  // find the last n whose first range is at most `number`
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (boundary(layout, middle) / size + middle <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    sequence = sequence_at(layout, low);
  }
  const int64_t index = number - first_token_range(layout, sequence, size);
  const int64_t start = sequence.start + index * size;
  const int64_t length = index < 0 ? 0 : clamp(sequence.end - start, 0, size);
  return {sequence, index, start, static_cast<int>(length)};
}

}  // namespace girih::kernels

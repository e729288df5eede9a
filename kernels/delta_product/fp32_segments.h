// Index and position of segments of up to 64 rows (DeltaSegments), and the function between chunks.
#pragma once

#include "delta_product/fp32.h"

namespace girih::kernels::delta_product {

__device__ inline int initial_position(const DeltaSegments& p, const Sequence& sequence) {
  if (p.position == nullptr) return 0;
  return static_cast<int>(clamp(p.position[sequence.index], 0, p.chunk - 1));
}

// Index of the first segment of the first chunk of a sequence.
__device__ inline int64_t first_segment(const DeltaSegments& p, const Sequence& sequence) {
  if (!is_packed(p.tokens)) return sequence.index * segments_per_row(p);
  return (sequence.start / p.chunk + spare_chunks(p) * sequence.index) * segments_per_chunk(p);
}

// Position of a token in its segment; moves from segment to segment.
struct SegmentPosition {
  int64_t index;
  int part;        // index of the segment in its chunk
  int at, length;  // index of the token in the segment; tokens of the segment

  // `token` counts from the start of the chunk in which the sequence begins; `first` is the first segment of
  // that chunk.
  __device__ SegmentPosition(const DeltaSegments& p, int64_t first, int64_t token) {
    const int64_t chunk = token / p.chunk;
    const int rest = static_cast<int>(token - chunk * p.chunk);
    part = rest / p.size;
    at = rest - part * p.size;
    index = first + chunk * segments_per_chunk(p) + part;
    length = length_of(p);
  }
  // The token is the last of its chunk.
  __device__ bool completes_chunk(const DeltaSegments& p) const {
    return at + 1 == length && part + 1 == segments_per_chunk(p);
  }
  // advance: to the first token of the next segment. retreat: to the last token of the previous segment.
  __device__ void advance(const DeltaSegments& p) {
    ++index;
    part = part + 1 == segments_per_chunk(p) ? 0 : part + 1;
    length = length_of(p);
    at = 0;
  }
  __device__ void retreat(const DeltaSegments& p) {
    --index;
    part = part == 0 ? segments_per_chunk(p) - 1 : part - 1;
    length = length_of(p);
    at = length - 1;
  }

 private:
  __device__ int length_of(const DeltaSegments& p) const {
    const int left = p.chunk - part * p.size;
    return left < p.size ? left : p.size;
  }
};

struct DeltaSegment {
  Sequence sequence;
  int64_t start;     // first token
  int length;        // tokens, 0..size
  bool has_between;  // the function between chunks is applied before the first token
};

__device__ inline DeltaSegment segment_at(const DeltaSegments& p, int64_t index) {
  Sequence sequence;
  if (!is_packed(p.tokens)) {
    sequence = sequence_at(p.tokens, index / segments_per_row(p));
  } else {
    int64_t low = 0,
            high = p.tokens.sequences - 1;  // binary search: last sequence whose first segment is <= index
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (first_segment(p, sequence_at(p.tokens, middle)) <= index) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    sequence = sequence_at(p.tokens, low);
  }
  const int64_t ordinal = index - first_segment(p, sequence), all = sequence.end - sequence.start;
  const int64_t chunk = ordinal / segments_per_chunk(p);
  const int part = static_cast<int>(ordinal - chunk * segments_per_chunk(p));
  // Token offsets in the sequence; the chunk may begin before the sequence does.
  const int64_t base = chunk * p.chunk - initial_position(p, sequence), begin = base + part * p.size;
  const int64_t stop = part + 1 == segments_per_chunk(p) ? base + p.chunk : begin + p.size;
  const int64_t first = clamp(begin, 0, all), end = clamp(stop, first, all);
  return {sequence, sequence.start + first, ordinal < 0 ? 0 : static_cast<int>(end - first),
          p.between != Between::none && part == 0 && begin > 0};
}

// phi(x)
__device__ inline float phi(Between which, float x) {
  if (which == Between::tanh) return tanhf(x);
  return 0.5f * x * (1.f + erff(x * 0.70710678f));
}

// phi'(x)
__device__ inline float phi_derivative(Between which, float x) {
  if (which == Between::tanh) {
    const float y = tanhf(x);
    return 1.f - y * y;
  }
  return 0.5f * (1.f + erff(x * 0.70710678f)) + 0.39894228f * x * expf(-0.5f * x * x);
}

}  // namespace girih::kernels::delta_product

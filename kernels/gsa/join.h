// Joins segments of a sequence that were scanned independently, each from zero:
//
//     S_in(n+1) = S_in(n) Diag(e^{L(n)}) + S_end(n)
//
// S_end(n) is the final state of segment n and L(n) the sum of its gates.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

struct SegmentJoin {
  SequenceLayout layout;
  int64_t segment_tokens;  // segments are numbered as in token_range_at() for this size
  int heads, M;
  bool reverse;            // the segments are joined from the last to the first
  float* states;           // [segments, heads, width[0] + width[1], M], contiguous: S_end, replaced by S_in
  const float* gate_sums;  // [segments, heads, M]: L
  int width[2];            // rows of each memory
  InputTensor<4> initial[2];  // [N, heads, width, M] fp32: initial state of the sequence; absent: zero
  // The final state of the sequence, in the same layout. If absent, S_end and L of the last segment are not
  // read.
  OutputTensor<4> final[2];
};

cudaError_t join_segments(const SegmentJoin& problem, cudaStream_t stream);

}  // namespace girih::kernels

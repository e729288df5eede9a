// Joins segments that were scanned separately:
//
//     S_in(n+1) = M(n) S_in(n) + S_end(n)
//
// S_end(n) is the state after segment n when it starts from zero. M(n) [D, D] is the transition of segment n:
// the state after it when it starts from the identity matrix and all values are zero. Segment 0 starts from
// the initial state, so S_in(1) = S_end(0).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

struct TransitionJoin {
  SequenceLayout tokens;
  int64_t segment;  // tokens of a segment
  int heads, D, V;  // D is a multiple of 4
  bool reverse;     // segments from the last to the first
  // [segments, heads, V, D] and [segments, heads, D, D], both column-major, with the given distances between
  // heads. `states` holds S_end and is overwritten by S_in. S_end and M of the last segment and M of the
  // first are not read.
  float* states;
  const float* transitions;
  int64_t states_stride, transitions_stride;
  InputTensor<4> initial;  // [N, heads, D, V] fp32: state before the first segment; absent: zero
};

cudaError_t join_transitions(const TransitionJoin& problem, cudaStream_t stream);

}  // namespace girih::kernels

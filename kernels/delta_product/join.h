// Segments of a sequence that were scanned apart, put together:
//
//     S_in(n+1) = M(n) S_in(n) + S_end(n)
//
// S_end(n) the state that segment n ends in when it starts from zero, M(n) [D, D] its transition: what it
// makes of the unit matrix without values. Segment 0 started from the initial state: S_in(1) = S_end(0). The
// same whether the segments were scanned by blocks of one GPU or by several GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

struct TransitionJoin {
  Tokens tokens;
  int64_t segment;  // tokens; segments are numbered as pieces of this size
  int heads, D, V;  // D a multiple of 4
  bool reverse;     // segments follow one another from last to first
  // Both [segments, heads, .., D], heads so many elements apart: S_end by columns, of which there are V,
  // overwritten by S_in, and M by columns. Neither is read of the segment that nothing follows, nor M of the
  // first.
  float* states;
  const float* transitions;
  int64_t states_apart, transitions_apart;
  In<4> initial;  // [N, heads, D, V] fp32: what the first segment starts from; absent: zero
};

cudaError_t join_transitions(const TransitionJoin& problem, cudaStream_t stream);

}  // namespace girih::kernels

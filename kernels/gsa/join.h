// Segments of a sequence that were scanned apart, each from zero, put together:
//
//     S_in(n+1) = S_in(n) Diag(e^{L(n)}) + S_end(n)
//
// S_end(n) the state that segment n ends in, L(n) the sum of its gates. The same whether the segments were
// scanned by blocks of one GPU or by several GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

struct SegmentJoin {
  Tokens tokens;
  int64_t segment;  // tokens; segments are numbered as pieces of this size
  int heads, M;
  bool reverse;        // segments follow one another from last to first
  float* states;       // [segments, heads, width[0] + width[1], M]: S_end, overwritten by S_in. Contiguous.
  const float* decay;  // [segments, heads, M]: L
  int width[2];        // a memory's rows
  In<4> initial[2];    // [N, heads, width, M] fp32: what the first segment starts from; absent: zero
  // The same of what the last segment ends in; absent: S_end and L of the segment that nothing follows are
  // not read.
  Out<4> final[2];
};

cudaError_t join_segments(const SegmentJoin& problem, cudaStream_t stream);

}  // namespace girih::kernels

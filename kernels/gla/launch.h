// Launch functions for each element type and tile of channels or keys. Each instance is compiled in its own
// file.
#pragma once

#include "gla/gla.h"
#include "gla/head.h"
#include "gsa/range.cuh"

namespace girih::kernels {

template <typename T, int M>
cudaError_t launch_gla_output(const GlaOutput& problem, cudaStream_t stream);
template <typename T, int M>
cudaError_t launch_gla_dq(const GlaDq& problem, cudaStream_t stream);

// The arguments of one launch of head_read_kernel.
struct HeadReadParams {
  HeadRead problem;
  Segmentation segmentation;
  int stages;        // of q and k
  int value_stages;  // of v
  int state_stages, output_warpgroups;
};

// Number of heads with a state.
__host__ __device__ inline int count_state_heads(const HeadRead& read) {
  return read.reverse ? read.shape.query_heads : read.shape.heads;
}

// The other chunk of the pair; its length is 0 if the sequence ends before it.
__device__ inline TokenRange partner_chunk(const TokenRange& range) {
  const int64_t index = range.index ^ 1, start = range.sequence.start + index * kChunk;
  return {range.sequence, index, start, static_cast<int>(clamp(range.sequence.end - start, 0, kChunk))};
}

template <typename T, int D, bool Reverse>
cudaError_t launch_head_read(HeadReadParams params, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_head_gradients(const HeadGradients& problem, cudaStream_t stream);
// Sums dg_parts and partner_gate_terms to dg.
cudaError_t sum_gate_gradients(const HeadGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

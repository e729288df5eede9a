// Launch functions for each element type and tile of channels or keys. Each instance is compiled in its own
// file.
#pragma once

#include "gla/gla.h"
#include "gla/head.h"
#include "gsa/walk.cuh"

namespace girih::kernels {

template <typename T, int M>
cudaError_t launch_gla_output(const GlaOutput& problem, cudaStream_t stream);
template <typename T, int M>
cudaError_t launch_gla_rows(const GlaRows& problem, cudaStream_t stream);

// The arguments of one launch of head_read_kernel.
struct HeadPass {
  HeadRead read;
  Segments cut;
  int stages, values, slots, readers;
};

// Number of heads with a state.
__host__ __device__ inline int state_heads(const HeadRead& read) {
  return read.reverse ? read.shape.query_heads : read.shape.heads;
}

// The other chunk of the pair; its length is 0 if the sequence ends before it.
__device__ inline Piece partner_of(const Piece& piece) {
  const int64_t index = piece.index ^ 1, start = piece.sequence.start + index * kChunk;
  return {piece.sequence, index, start, static_cast<int>(clamp(piece.sequence.end - start, 0, kChunk))};
}

template <typename T, int D, bool Reverse>
cudaError_t launch_head_read(HeadPass pass, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_head_gradients(const HeadGradients& problem, cudaStream_t stream);
// Sums dg_parts and across to dg.
cudaError_t sum_head_gates(const HeadGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

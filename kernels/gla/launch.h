// The kernels by element type and tile of channels or keys; each is compiled in a file of its own.
#pragma once

#include "gla/gla.h"
#include "gla/head.h"
#include "gsa/walk.cuh"

namespace girih::kernels {

template <typename T, int M>
cudaError_t launch_gla_output(const GlaOutput& problem, cudaStream_t stream);
template <typename T, int M>
cudaError_t launch_gla_rows(const GlaRows& problem, cudaStream_t stream);

// One gate a head: one launch over a read.
struct HeadPass {
  HeadRead read;
  Segments cut;
  int stages, values, slots, readers;
};

// Heads that have a state of their own.
__host__ __device__ inline int state_heads(const HeadRead& read) {
  return read.reverse ? read.shape.query_heads : read.shape.heads;
}

// The other chunk of a chunk's pair; without tokens where the sequence ends before it.
__device__ inline Piece partner_of(const Piece& piece) {
  const int64_t index = piece.index ^ 1, start = piece.sequence.start + index * kChunk;
  return {piece.sequence, index, start, static_cast<int>(clamp(piece.sequence.end - start, 0, kChunk))};
}

template <typename T, int D, bool Reverse>
cudaError_t launch_head_read(HeadPass pass, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_head_gradients(const HeadGradients& problem, cudaStream_t stream);
// dg of its parts.
cudaError_t sum_head_gates(const HeadGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

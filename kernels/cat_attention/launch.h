// The kernels by element type and columns of a tile; each is compiled in a file of its own.
#pragma once

#include "cat_attention/cat_attention.h"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {

template <typename T, int Tile>
cudaError_t launch_cat_forward(const CatForward& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_cat_query_gradients(const CatQueryGradients& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_cat_header_gradients(const CatHeaderGradients& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_cat_own_gradients(const CatOwnGradients& problem, cudaStream_t stream);

// Of q, o, dq: a block for every so many rows of a head.
inline int64_t query_blocks(const CatShape& shape, int rows) {
  return divide_up(shape.rows, rows) * shape.chunks.batch * shape.query_heads;
}

template <auto Kernel, class Problem>
cudaError_t launch_cat(const Problem& p, int64_t blocks, int threads, int bytes, cudaStream_t stream) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (bytes > limit) return cudaErrorInvalidValue;
  return launch_kernel<Kernel>(p, blocks, threads, bytes, stream, limit);
}

}  // namespace girih::kernels

// Launches of kernels with one block for each tile.
#pragma once

#include "cat_attention/kernels.h"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {

// Number of blocks for q, o and dq: one block for each `rows` rows of a query head.
inline int64_t count_query_blocks(const CatShape& shape, int rows) {
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

// Sums over blocks: total[column] = sum over i of partials[i, column], partials [count, columns]. The order
// of the additions does not depend on the device.
#pragma once

#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {

constexpr int kPartialColumns = 32, kPartialWarps = 32;

// A block has 32 columns. Warp w adds the partials w, w + 32, ..., one column for each lane; then warp c adds
// the sums of all warps for column c.
template <int Columns>
__global__ void __launch_bounds__(Columns* kPartialWarps)
    sum_partials(const float* partials, const int64_t count, const int columns, const OutputTensor<1> total) {
  static_assert(Columns == 32);
  __shared__ float parts[kPartialWarps][Columns + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * Columns + lane;
  float sum = 0.f;
  if (column < columns) {
#pragma unroll 4
    for (int64_t i = warp; i < count; i += kPartialWarps) sum += partials[i * columns + column];
  }
  parts[warp][lane] = sum;
  __syncthreads();  // parts of all warps are stored
  float all = parts[lane][warp];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) all += __shfl_xor_sync(~0u, all, offset);
  const int own = blockIdx.x * Columns + warp;
  if (lane == 0 && own < columns) store_element(total, all, own);
}

inline cudaError_t launch_sum_partials(const float* partials, int64_t count, int columns,
                                       const OutputTensor<1>& total, cudaStream_t stream) {
  return launch_grid<sum_partials<kPartialColumns>>(divide_up(columns, kPartialColumns),
                                                    kPartialColumns * kPartialWarps, 0, stream, partials,
                                                    count, columns, total);
}

}  // namespace girih::kernels

// Rows of a matrix distributed over groups of lanes. A group has a power of two of lanes, at most 32; a lane
// has `N` neighbouring columns of a row, and the same N columns of every further 32 N columns. A sum over
// columns stays within a group; a sum over rows passes through shared memory, in a fixed order.
#pragma once

#include "tile/pack.h"

namespace girih::kernels {

// The rows and columns of a thread in a matrix whose rows have `width` columns.
template <int N, int Threads>
struct RowGroups {
  int lanes;       // lanes of a group
  int row, col;    // first row and column of the thread
  int rows, cols;  // distance to the next row and to the next N columns of the thread

  __host__ __device__ static int lanes_of(int width) {
    int lanes = 1;
    while (lanes < 32 && lanes * N < width) lanes *= 2;
    return lanes;
  }
  __device__ explicit RowGroups(int width)
      : lanes(lanes_of(width)),
        row(static_cast<int>(threadIdx.x / static_cast<unsigned>(lanes))),
        col(static_cast<int>(threadIdx.x % static_cast<unsigned>(lanes)) * N),
        rows(static_cast<int>(Threads / static_cast<unsigned>(lanes))),
        cols(lanes * N) {}

  // Sums over the lanes of a group; every lane gets the sums.
  template <int K>
  __device__ void add_up(float (&sums)[K]) const {
    for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
      for (int j = 0; j < K; ++j) sums[j] += __shfl_xor_sync(~0u, sums[j], step);
    }
  }
  // Sums over the groups of a warp.
  __device__ void add_up(Pack<N>& sum) const {
    for (int step = lanes; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum.at[i] += __shfl_xor_sync(~0u, sum.at[i], step);
    }
  }
  // The sum of one value of every warp; the values lie `apart` floats from each other.
  __device__ static float sum_of_warps(const float* parts, int apart) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < Threads / 32; ++w) sum += parts[w * apart];
    return sum;
  }
};

}  // namespace girih::kernels

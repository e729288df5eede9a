// A matrix's rows by groups of a block's threads: of up to 32 lanes, a power of two, each with `N`
// neighbouring columns of a row, and of every 32 N further ones where there are more. Sums over columns stay
// in a group, those over rows go from warp to warp through shared memory, in one order.
#pragma once

#include "tile/pack.h"

namespace girih::kernels {

// A thread's share of a matrix whose rows have so many columns.
template <int N, int Threads>
struct RowGroups {
  int lanes;       // of a group
  int row, col;    // the thread's first
  int rows, cols;  // from each to the thread's next: of all groups, of a group

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

  // Over a group's lanes, each of which gets the sums.
  template <int K>
  __device__ void add_up(float (&sums)[K]) const {
    for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
      for (int j = 0; j < K; ++j) sums[j] += __shfl_xor_sync(~0u, sums[j], step);
    }
  }
  // Over the groups of a warp.
  __device__ void add_up(Pack<N>& sum) const {
    for (int step = lanes; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum.at[i] += __shfl_xor_sync(~0u, sum.at[i], step);
    }
  }
  // What the warps have left, `apart` from one's to the next's.
  __device__ static float sum_of_warps(const float* parts, int apart) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < Threads / 32; ++w) sum += parts[w * apart];
    return sum;
  }
};

}  // namespace girih::kernels

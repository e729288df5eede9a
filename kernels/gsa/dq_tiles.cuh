// Shared memory of gsa_dq_kernel, and exchange of accumulators through it.
#pragma once

#include "gsa/block.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GsaDqTiles {
  static constexpr int kWarpgroups = M / 64;
  // With 128 slots do is loaded to the tile of q after q has been read; then two blocks fit on a
  // multiprocessor.
  static constexpr bool kReusesQueryTile = kWarpgroups > 1;
  // Tiles of 8 columns of z that are stored here during the read of dp, in place of hk and k, which are
  // loaded again. A thread then has 128 registers; with all of z in registers the compiler spilled.
  static constexpr int kSpillTiles = 7;
  static constexpr int kSoftmaxFloats = kWarpgroups > 1 ? 1024 : 0;

  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, hk, hv;
  SharedTile<T, kChunk, kSlab> q, k, v, dout;
  float* softmax;  // [warpgroups, 64, 4]: SoftmaxSums of each warpgroup, once z is back in registers
  float *totals, *decay, *own;  // own [2, 64]: scores of rows with themselves

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 3 * SharedTile<T, kChunk, M>::kBytes +
                                (kReusesQueryTile ? 3 : 4) * SharedTile<T, kChunk, kSlab>::kBytes +
                                (kSoftmaxFloats + 5 * M + 2 * kChunk) * 4;
  static_assert(kWarpgroups == 1 || kWarpgroups * kWarpgroupThreads * kSpillTiles * 16 ==
                                        SharedTile<T, kChunk, M>::kBytes +
                                            SharedTile<T, kChunk, kSlab>::kBytes + kSoftmaxFloats * 4);

  __device__ explicit GsaDqTiles(unsigned char* shared) {
    SharedAllocator layout(shared);
    layout(g)(s)(hv)(hk)(k)(softmax, kSoftmaxFloats)(q)(v)(totals, 4 * M)(decay, M)(own, 2 * kChunk);
    if constexpr (kReusesQueryTile) {
      dout = q;
    } else {
      layout(dout);
    }
  }
};

// Stores, loads or adds the first Count tiles of 8 columns of an accumulator, in the order of lanes: to spill
// it, or to pass it to another warp.
template <int Count, int N>
__device__ inline void store_accumulator(float* to, const Accumulator<N>& sums) {
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    reinterpret_cast<float4*>(to)[32 * n + lane()] = {sums.at[n][0], sums.at[n][1], sums.at[n][2],
                                                      sums.at[n][3]};
  }
}
template <int Count, int N>
__device__ inline void load_accumulator(Accumulator<N>& sums, const float* from) {
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    const float4 x = reinterpret_cast<const float4*>(from)[32 * n + lane()];
    sums.at[n][0] = x.x, sums.at[n][1] = x.y, sums.at[n][2] = x.z, sums.at[n][3] = x.w;
  }
}
template <int N>
__device__ inline void add_accumulator(Accumulator<N>& sums, const float* from) {
  Accumulator<N> other;
  load_accumulator<N>(other, from);
  add(sums, other);
}

}  // namespace girih::kernels

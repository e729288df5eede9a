// Shared memory of a block of the gradients of query rows, and sums on their way through it.
#pragma once

#include "gsa/block.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GsaRowTiles {
  static constexpr int kGroups = M / 64;
  // With 128 slots two blocks fit where do comes after q.
  static constexpr bool kOneByOne = kGroups > 1;
  // Of z's 8 columns by 8 those that wait here for dp, in the place of hk and k, which come again: with all
  // of z in the 128 registers that a thread then has, what does not fit went to memory and back.
  static constexpr int kAside = 7;
  static constexpr int kSoftmax = kGroups > 1 ? 1024 : 0;

  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, hk, hv;
  SharedTile<T, kChunk, kSlab> q, k, v, dout;
  float* softmax;               // [groups, 64, 4]: a group's SoftmaxSums, once z is no longer aside
  float *totals, *decay, *own;  // own [2, 64]: scores of rows with themselves

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 3 * SharedTile<T, kChunk, M>::kBytes +
                                (kOneByOne ? 3 : 4) * SharedTile<T, kChunk, kSlab>::kBytes +
                                (kSoftmax + 5 * M + 2 * kChunk) * 4;
  static_assert(kGroups == 1 || kGroups * kGroup * kAside * 16 == SharedTile<T, kChunk, M>::kBytes +
                                                                      SharedTile<T, kChunk, kSlab>::kBytes +
                                                                      kSoftmax * 4);

  __device__ explicit GsaRowTiles(unsigned char* shared) {
    Layout layout(shared);
    layout(g)(s)(hv)(hk)(k)(softmax, kSoftmax)(q)(v)(totals, 4 * M)(decay, M)(own, 2 * kChunk);
    if constexpr (kOneByOne) {
      dout = q;
    } else {
      layout(dout);
    }
  }
};

// The first Count by 8 columns of sums, lane by lane: aside and back, or from one warp to another.
template <int Count, int N>
__device__ inline void put_sums(float* to, const Sums<N>& sums) {
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    reinterpret_cast<float4*>(to)[32 * n + lane()] = {sums.at[n][0], sums.at[n][1], sums.at[n][2],
                                                      sums.at[n][3]};
  }
}
template <int Count, int N>
__device__ inline void take_sums(Sums<N>& sums, const float* from) {
#pragma unroll
  for (int n = 0; n < Count; ++n) {
    const float4 put = reinterpret_cast<const float4*>(from)[32 * n + lane()];
    sums.at[n][0] = put.x, sums.at[n][1] = put.y, sums.at[n][2] = put.z, sums.at[n][3] = put.w;
  }
}
template <int N>
__device__ inline void add_sums(Sums<N>& sums, const float* from) {
  Sums<N> other;
  take_sums<N>(other, from);
  add(sums, other);
}

}  // namespace girih::kernels

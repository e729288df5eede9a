// What a chunk brings to the scans of both directions, and who brings it.
#pragma once

#include "delta_product/prepared.cuh"
#include "tile/launch.h"
#include "tile/shared.h"
#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

// What the warpgroups of a block of so many threads have of registers at the start, a thread of each.
__host__ __device__ constexpr int registers_of(int threads) {
  return threads / 128 * (65536 / threads / 8 * 8);
}

constexpr int kLoaders = 2;  // warps

// A chunk's rows of a block's columns.
template <typename T>
using Values = SharedTile<T, kDeltaRows, kScanColumns>;

// A chunk's keys, what was prepared of it and, in the scan, v.
template <typename T, int D, bool HasValues = true>
struct Stage {
  using K = BlockTile<T, D>;
  using V = Values<T>;
  static constexpr int kInverse = K::kBytes + (HasValues ? V::kBytes : 0),
                       kPrepared = kInverse + InverseRows::kBytes - kDeltaInverseBytes;
  static constexpr int kBytes = (kPrepared + kDeltaLost + 1023) / 1024 * 1024;

  unsigned char* data;

  __device__ K k() const { return {reinterpret_cast<T*>(data)}; }
  __device__ V v() const {
    static_assert(HasValues);
    return {reinterpret_cast<T*>(data + K::kBytes)};
  }
  __device__ InverseRows inverse() const { return {data + kInverse}; }
  __device__ Prepared prepared() const { return {data + kPrepared}; }

  // Fills a stage, but for what stands beside the keys; a thread's share.
  class Loader {
    static constexpr int kThreads = 32 * kLoaders;
    TileCopier<kThreads, K> k_;
    int thread_;

   public:
    __device__ Loader(const T* k, int64_t stride, int cols, int thread)
        : k_(k, stride, cols, thread), thread_(thread) {}

    __device__ void start(const Stage& stage, int first, int rows, const unsigned char* prepared) const {
      k_.start(stage.k(), first, rows);
      const uint32_t inverse = shared_address(stage.data + kInverse),
                     to = shared_address(stage.data + kPrepared + thread_ * 16);
      const unsigned char* const from = prepared + thread_ * 16;
      // Two warps bring two blocks of X at a time.
      copy_async(inverse + place(0, 1, 2, 3), from, false);
#pragma unroll
      for (int i = 0; i < kDeltaLost; i += kThreads * 16) {
        if (i + thread_ * 16 >= kDeltaLost) continue;
        const int one = i / 512, other = one + 1;
        const bool inverts = i < kDeltaInverseBytes;
        copy_async(inverts ? inverse + place(row_of(one), one - block_of(row_of(one), 0), row_of(other),
                                             other - block_of(row_of(other), 0))
                           : to + i,
                   from + i, true);
      }
    }

   private:
    static_assert(kLoaders == 2 && kDeltaInverseBytes % 1024 == 0, "");

    __device__ static constexpr int row_of(int block) {
      return block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    }
    // Where the thread's pack of its warp's block goes.
    __device__ int place(int i0, int j0, int i1, int j1) const {
      return (thread_ < 32 ? InverseRows::block(i0, j0) : InverseRows::block(i1, j1)) +
             thread_ / 16 % 2 * InverseRows::kNext + thread_ % 16 * 16;
    }
  };
};

}  // namespace girih::kernels::delta_product

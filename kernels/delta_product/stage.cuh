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

// A loader's thread's share of a tile of one chunk after another.
template <class Tile>
using StageCopier = TileCopier<32 * kLoaders, Tile>;

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

  // Brings what was prepared; a loader's thread's share.
  __device__ void start_prepared(const unsigned char* prepared, int thread) const {
    constexpr int kStep = 512 * kLoaders;  // bytes
    static_assert(kLoaders == 2 && kDeltaInverseBytes % kStep == 0);
    const uint32_t inverse = shared_address(data + kInverse) + thread / 16 % 2 * InverseRows::kNext +
                             thread % 16 * 16,
                   to = shared_address(data + kPrepared + thread * 16);
    const unsigned char* const from = prepared + thread * 16;
    // A warp brings a block of X at a time: the first warp's, or the other's.
    const auto place = [&](int first, int second) { return inverse + (thread < 32 ? first : second); };
    copy_async(place(right_of(0), right_of(1)), from, false);
#pragma unroll
    for (int i = 0; i < kDeltaLost; i += kStep) {
      if (i + thread * 16 >= kDeltaLost) continue;
      const int block = i / 512;
      const bool inverts = i < kDeltaInverseBytes;
      copy_async(inverts ? place(start_of(block), start_of(block + 1)) : to + i, from + i, true);
    }
  }

 private:
  // Where a block of X goes, and the two blocks right of the diagonal.
  __device__ static constexpr int start_of(int block) {
    const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    return InverseRows::block(row, block - block_of(row, 0));
  }
  __device__ static constexpr int right_of(int which) { return InverseRows::block(2 * which, 2 * which + 1); }
};

}  // namespace girih::kernels::delta_product

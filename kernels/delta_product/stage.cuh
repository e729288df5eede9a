// A stage of the ring of keys and values, for the scan and for reverse, and the copies that fill it.
#pragma once

#include "delta_product/prepared.cuh"
#include "tile/launch.h"
#include "tile/shared.h"
#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

// Registers at launch of one thread of every warpgroup of a block, summed over the warpgroups.
__host__ __device__ constexpr int registers_of(int threads) {
  return threads / 128 * (65536 / threads / 8 * 8);
}

constexpr int kLoaders = 2;  // warps

// The share of one load thread in the copies of a tile.
template <class Tile>
using StageCopier = TileCopier<32 * kLoaders, Tile>;

// v of a chunk: 64 rows, 64 columns.
template <typename T>
using Values = SharedTile<T, kDeltaRows, kScanColumns>;

// Keys, prepared data and, in the scan, v of a chunk.
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

  // Starts the copies of the prepared data; `thread` is the index among the load warps.
  __device__ void start_prepared(const unsigned char* prepared, int thread) const {
    constexpr int kStep = 512 * kLoaders;  // bytes
    static_assert(kLoaders == 2 && kDeltaInverseBytes % kStep == 0);
    const uint32_t inverse = shared_address(data + kInverse) + thread / 16 % 2 * InverseRows::kNext +
                             thread % 16 * 16,
                   to = shared_address(data + kPrepared + thread * 16);
    const unsigned char* const from = prepared + thread * 16;
    // A warp copies one block of X at a time. `first` is the block of warp 0, `second` the block of warp 1.
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
  // Offset of a block of X, and of the two zero blocks right of the diagonal.
  __device__ static constexpr int start_of(int block) {
    const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    return InverseRows::block(row, block - block_of(row, 0));
  }
  __device__ static constexpr int right_of(int which) { return InverseRows::block(2 * which, 2 * which + 1); }
};

}  // namespace girih::kernels::delta_product

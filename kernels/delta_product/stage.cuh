// A stage of the ring of keys and values, for the scan and for reverse, and the copies that fill it.
#pragma once

#include "delta_product/prepared.cuh"
#include "pipe/roles.h"
#include "tile/launch.h"
#include "tile/shared.h"
#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

constexpr int kLoadWarps = 2;  // number of load warps of a block

// The share of one load thread in the copies of a tile.
template <class Tile>
using StageCopier = TileCopier<32 * kLoadWarps, Tile>;

// 64 columns of v of a chunk.
template <typename T>
using Values = SharedTile<T, kDeltaChunkRows, kScanColumns>;

// Keys, prepared data and, in the scan, v of a chunk.
template <typename T, int D, bool HasValues = true>
struct Stage {
  using K = BlockTile<T, D>;
  using V = Values<T>;
  // X is an InverseTile; the row factors and the flags follow. kPreparedOffset points into X, such that the
  // factors and the flags have the offsets of the prepared data in global memory. Prepared::load_inverse() is
  // not valid here, because the layout of X differs.
  static constexpr int kInverseOffset = K::kBytes + (HasValues ? V::kBytes : 0),
                       kPreparedOffset = kInverseOffset + InverseTile::kBytes - kDeltaInverseBytes;
  static constexpr int kBytes = (kPreparedOffset + kDeltaInverseLoOffset + 1023) / 1024 * 1024;

  unsigned char* data;

  __device__ K k() const { return {reinterpret_cast<T*>(data)}; }
  __device__ V v() const {
    static_assert(HasValues);
    return {reinterpret_cast<T*>(data + K::kBytes)};
  }
  __device__ InverseTile inverse() const { return {data + kInverseOffset}; }
  __device__ Prepared prepared() const { return {data + kPreparedOffset}; }  // factors and flags only

  // Starts the copies of the prepared data; `thread` is the index among the load warps.
  __device__ void start_prepared(const unsigned char* prepared, int thread) const {
    constexpr int kStep = 512 * kLoadWarps;  // bytes
    static_assert(kLoadWarps == 2 && kDeltaInverseBytes % kStep == 0);
    const uint32_t inverse = shared_address(data + kInverseOffset) +
                             thread / 16 % 2 * InverseTile::kColumnStride + thread % 16 * 16,
                   to = shared_address(data + kPreparedOffset + thread * 16);
    const unsigned char* const from = prepared + thread * 16;
    // A warp copies one block of X at a time. `first` is the block of warp 0, `second` the block of warp 1.
    const auto address = [&](int first, int second) { return inverse + (thread < 32 ? first : second); };
    copy_async(address(zero_block_offset(0), zero_block_offset(1)), from, false);
#pragma unroll
    for (int i = 0; i < kDeltaInverseLoOffset; i += kStep) {
      if (i + thread * 16 >= kDeltaInverseLoOffset) continue;
      const int block = i / 512;
      const bool is_inverse = i < kDeltaInverseBytes;
      copy_async(is_inverse ? address(block_offset(block), block_offset(block + 1)) : to + i, from + i, true);
    }
  }

 private:
  // Offset of a block of X, and of the two zero blocks right of the diagonal.
  __device__ static constexpr int block_offset(int block) {
    const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    return InverseTile::block(row, block - inverse_block_index(row, 0));
  }
  __device__ static constexpr int zero_block_offset(int which) {
    return InverseTile::block(2 * which, 2 * which + 1);
  }
};

}  // namespace girih::kernels::delta_product

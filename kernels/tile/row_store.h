// Rows that warps leave in shared memory, and one warp brings to global memory without waiting for each: on
// Hopper by copies of whole rows (cp.async.bulk) that need neither registers nor the warp, else through its
// registers.
//
//     a warp that makes them     store_block_transposed(tile, ...); arrive(...);
//     the one that stores them   wait(...); store_rows_async(tile, ...); wait_stores();    the tile is free
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

// Rows x Cols elements of 16 bits, rows 16 bytes further apart than they are long: neither stmatrix nor
// ldmatrix meets conflicts, and a row is one piece. `data` is a multiple of 16 bytes.
template <typename T, int Rows, int Cols>
struct PaddedTile {
  using Element = T;
  static constexpr int kRows = Rows;
  static constexpr int kCols = Cols;
  static constexpr int kPitch = Cols + 8;
  static constexpr int kBytes = Rows * kPitch * static_cast<int>(sizeof(T));
  static_assert(sizeof(T) == 2 && Cols % 64 == 0);

  T* data;

  __device__ T& at(int row, int col) const { return data[row * kPitch + col]; }
  __device__ T& at(int row, int col, int lane_row, int lane_col) const {
    return at(row + lane_row, col + lane_col);
  }
  __device__ uint32_t address(int row, int col, int lane_row, int lane_col) const {
    return shared_address(&at(row, col, lane_row, lane_col));
  }
};

// A left factor to the tile's columns: what the transpose of the tile has at (row, col) afterwards.
template <class Tile>
__device__ inline void store_block_transposed(const Tile& tile, int row, int col, const uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = tile.address(col, row, (lane() & 7) + (lane() >> 4) * 8, ((lane() >> 3) & 1) * 8);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint32_t*>(&lane_at(tile, col + i / 2 * 8, row + i % 2 * 8)) = transpose_pairs(a[i]);
  }
#endif
}

// `bytes` of shared memory, a multiple of 16, to global memory; under way until wait_stores().
__device__ inline void store_async(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
#else
#pragma unroll 4
  for (int i = 0; i < bytes / 16; ++i) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
#endif
}

// What others wrote to shared memory before this thread saw their arrival, its stores read.
__device__ inline void fence_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}
// The thread's stores have read what they store.
__device__ inline void wait_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\n" ::: "memory");
#endif
}

// A tile's first rows, `cols` elements of each (a multiple of 8), by one warp.
template <class Tile>
__device__ inline void store_rows_async(const Tile& tile, typename Tile::Element* to, int64_t stride,
                                        int rows, int cols) {
  for (int row = lane(); row < min(rows, Tile::kRows); row += 32) {
    store_async(to + row * stride, &tile.at(row, 0), 2 * cols);
  }
}

}  // namespace girih::kernels

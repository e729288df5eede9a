// Stores of whole rows to global memory, from registers or through shared memory.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

// Rows x Cols 16-bit elements with a padding of 16 bytes after each row, so that stmatrix and ldmatrix have
// no bank conflicts and a row is contiguous. `data` is aligned to 16 bytes.
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
  __device__ uint32_t address(int row, int col) const { return shared_address(&at(row, col)); }
  __device__ uint32_t address(int row, int col, int lane_row, int lane_col) const {
    return shared_address(&at(row, col, lane_row, lane_col));
  }
};

// Stores a 16 x 16 left factor transposed: element (i, j) of a becomes (col + j, row + i) of the tile.
template <class Tile>
__device__ inline void store_block_transposed(const Tile& tile, int row, int col, const uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = tile.address(col, row, (lane() & 7) + (lane() >> 4) * 8, ((lane() >> 3) & 1) * 8);
  ptx::stmatrix_x4_trans(address, a);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint32_t*>(&lane_element(tile, col + i / 2 * 8, row + i % 2 * 8)) =
        transpose_pairs(a[i]);
  }
#endif
}

// Stores 16 bytes to global memory in one instruction. The compiler splits the assignment of a uint4 if the
// address is advanced after it, and then four times as many sectors are written.
__device__ inline void store_pack(void* to, const uint32_t (&x)[4]) { ptx::st_global_v4(to, x); }

// Rounds the warp's 16 rows, from row `row`, and stores them to global memory. A lane stores 8 of every 32
// columns in one access.
template <typename T, int N>
__device__ inline void store_rows(const Accumulator<N>& sums, T* to, int64_t stride, int row, int rows,
                                  int cols) {
  static_assert(N % 4 == 0, "");
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = row + lane_row() + 8 * i;
    T* const to_row = to + r * stride;
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      uint32_t pack[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) pack[m] = pack_pair<T>(sums.at[n + m][2 * i], sums.at[n + m][2 * i + 1]);
      transpose_quad(pack);
      const int col = 8 * n + 4 * lane_col();
      if (r >= rows || col >= cols) continue;
      store_pack(to_row + col, pack);
    }
  }
}

// Stores the first `rows` rows of a tile, `cols` elements of each (a multiple of 8), 16 bytes for each lane,
// as warp `warp` of `Warps`. cp.async.bulk would need no registers, but a warp starts one row at a time.
template <int Warps, class Tile>
__device__ inline void store_rows(const Tile& tile, typename Tile::Element* to, int64_t stride, int rows,
                                  int cols, int warp) {
  constexpr int kPacks = Tile::kCols / 8, kStep = 32 / kPacks, kLoads = Tile::kRows / kStep / Warps,
                kBatch = kLoads < 8 ? kLoads : 8;
  static_assert(kPacks <= 32 && kLoads % kBatch == 0);
  const int first = warp * (Tile::kRows / Warps) + lane() / kPacks, col = lane() % kPacks * 8;
  to += first * stride + col;
  int left = col < cols ? rows - first : 0;  // rows left from the lane's row
#pragma unroll 1
  for (int i = 0; i < kLoads; i += kBatch) {
    uint32_t pack[kBatch][4];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint4 x = *reinterpret_cast<const uint4*>(&tile.at(first + (i + j) * kStep, col));
      pack[j][0] = x.x, pack[j][1] = x.y, pack[j][2] = x.z, pack[j][3] = x.w;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j * kStep < left) store_pack(to, pack[j]);
      to += kStep * stride;
    }
    left -= kBatch * kStep;
  }
}

}  // namespace girih::kernels

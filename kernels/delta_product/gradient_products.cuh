// The wgmma products of gradients, as in tile/warpgroup.h. A descriptor is the start of the block's shared
// memory plus constants. Computing it for every tile would be a quarter of the instructions, and descriptors
// that live from product to product would be spilled.
#pragma once

#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

// The start of the block's shared memory in units of 16 bytes, and the address of each thread's row of its
// warp, both stored in shared memory. They are loaded at each use, so the compiler cannot keep derived
// addresses in registers.
class Origin {
  const unsigned char* room_;
  uint32_t *word_, *of_thread_;

 public:
  Origin() = default;
  // `of_thread`: one word for each thread of the block.
  __device__ Origin(const unsigned char* room, uint32_t* word, uint32_t* of_thread)
      : room_(room), word_(word), of_thread_(of_thread) {}

  // Called by every thread before all other members.
  __device__ void put() const {
    if (threadIdx.x == 0) *word_ = (shared_address(room_) & 0x3ffff) >> 4;
    of_thread_[threadIdx.x] = shared_address(room_) + (16 * group_warp() + (lane() & 15)) * 128 +
                              ((lane() >> 4) ^ (lane() & 7)) * 16;
  }
  __device__ uint32_t get() const { return *word_; }
  // Address of the lane's 16 bytes of the first 16 columns of its warp's rows of a tile.
  __device__ uint32_t address(const void* data) const {
    return of_thread_[threadIdx.x] + (shared_address(data) - shared_address(room_));
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // Low word of the descriptor of a tile from (row, col) on. `origin` is the result of get().
  template <Lines lines, typename T, int Cols, int Rows>
  __device__ uint32_t low(uint32_t origin, const BlockTile<T, Cols, Rows>& tile, int row, int col) const {
    constexpr uint32_t kNext = lines == Lines::rows ? 1 : BlockTile<T, Cols, Rows>::Block::kBytes / 16;
    const uint32_t from = shared_address(tile.data) - shared_address(room_);
    return origin + (from / 16 + kNext * 65536 + further<Rows>(row, col));
  }
  template <int Rows>
  __device__ static constexpr unsigned further(unsigned row, unsigned col) {
    return col / 64 * (Rows * 8) + row * 8 + col % 64 / 8;
  }
  __device__ static uint64_t whole(uint32_t low) {
    constexpr uint32_t kHigh = uint32_t{1} << 30 | 1024 / 16;
    return static_cast<uint64_t>(kHigh) << 32 | low;
  }
#endif
};

// The warp's 16 rows of a tile from column `col` on, a multiple of 64, in blocks of 16 columns.
template <class Tile>
class WarpRows {
  Tile tile_;
  int col_;
  uint32_t address_;  // the lane's address in the first block

  __device__ uint32_t address(int further) const {
    return (address_ ^ further % 64 * 2) + further / 64 * Tile::Block::kBytes;
  }

 public:
  __device__ WarpRows(const Origin& origin, const Tile& tile, int col) : tile_(tile), col_(col) {
    address_ = origin.address(tile.data) + col / 64 * Tile::Block::kBytes;
  }
  __device__ void load(uint32_t (&a)[4], int further) const { load_matrices(a, address(further)); }
  __device__ void put(int further, const uint32_t (&a)[4]) const {
#if __CUDA_ARCH__ >= 900
    put_matrices(address(further), a);
#else
    store_block(tile_, 16 * group_warp(), col_ + further, a);
#endif
  }
  // Eight elements of rows 4 i + lane / 8; eight lanes cover a row of 64 columns.
  __device__ uint4 pack(int i, int further) const {
    const int first = (16 * group_warp() + lane() / 8) * 128 + (lane() / 8 ^ lane() % 8) * 16;
    return *reinterpret_cast<const uint4*>(
        reinterpret_cast<const unsigned char*>(tile_.block(col_ + further).data) + (first ^ i % 2 * 64) +
        i * 512);
  }
};

// Starts sums += x y^T: 64 rows of x, 8 N rows of y (64 or 32) from `row` on.
template <typename T, int N, int Cols>
__device__ inline void start_product_transposed(const Origin& origin, Sums<N>& sums,
                                                const BlockTile<T, Cols>& x, const BlockTile<T, Cols>& y,
                                                int row = 0) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint32_t start = origin.get(), a = origin.low<Lines::rows>(start, x, 0, 0),
                 b = origin.low<Lines::rows>(start, y, row, 0);
#pragma unroll
  for (int col = 0; col < Cols; col += 16) {
    const unsigned further = Origin::further<64>(0, col);
    group_mma<T, Lines::rows, 8 * N>(sums.at, Origin::whole(a + further), Origin::whole(b + further));
  }
#else
  start_product_transposed(sums, x, y, row);
#endif
}

// Starts sums[:, 0..8N-1] += x y, or with Sign = -1 sums -= x y: 64 columns of x from `x_col` on, 64 rows of
// y, columns of y from `col` on.
template <typename T, int Sign = 1, int N, int XCols, int Cols>
__device__ inline void start_product(const Origin& origin, Sums<N>& sums, const BlockTile<T, XCols>& x,
                                     int x_col, const BlockTile<T, Cols>& y, int col) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint32_t start = origin.get(), a = origin.low<Lines::rows>(start, x, 0, x_col),
                 b = origin.low<Lines::columns>(start, y, 0, col);
#pragma unroll
  for (int k = 0; k < 64; k += 16) {
#pragma unroll
    for (int n = 0; n < N; n += 8) {
      group_mma<T, Lines::columns, 64, true, Sign>(sums.at + n, Origin::whole(a + Origin::further<64>(0, k)),
                                                   Origin::whole(b + Origin::further<64>(k, 8 * n)));
    }
  }
#else
  start_product<T, Sign>(sums, x, x_col, y, col);
#endif
}
// The same with a fragment as left factor: 16 K rows of y from `row` on.
template <typename T, int Sign = 1, int K, int N, int Cols>
__device__ inline void start_product(const Origin& origin, Sums<N>& sums, const Operand<K>& a,
                                     const BlockTile<T, Cols>& y, int col, int row = 0) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint32_t b = origin.low<Lines::columns>(origin.get(), y, row, col);
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < N; n += 8) {
      group_mma<T, Lines::columns, 64, true, Sign>(sums.at + n, a.at[k],
                                                   Origin::whole(b + Origin::further<64>(16 * k, 8 * n)));
    }
  }
#else
  start_product<T, Sign>(sums, a, y, col, row);
#endif
}

}  // namespace girih::kernels::delta_product

// Products of 64 rows by a warpgroup: four warps, the first with an index that is a multiple of 4. Warp w has
// rows 16 w to 16 w + 15 in the layout of Accumulator<N> and AFragment<K>. On sm_90a a product is a wgmma:
// the four warps share one read of the right factor from shared memory, and a left factor in shared memory
// needs no registers. On other architectures each warp uses mma.sync.
//
// A product is asynchronous from its start to the wait for it:
//
//     wgmma_fence(sums);       orders register accesses before the products
//     wgmma_start(sums, ...);
//     wgmma_commit();
//     wgmma_wait<0>(sums);
#pragma once

#include <type_traits>

#include "tile/matrix.h"

namespace girih::kernels {

// Rows x Cols 16-bit elements in blocks of 64 columns. A row of a block is a line of 128 bytes, swizzled as
// in a SharedTile. `data` is aligned to 1024 bytes, as wgmma requires.
template <typename T, int Cols, int Rows = 64>
struct BlockTile {
  using Element = T;
  using Block = SharedTile<T, Rows, 64>;
  static constexpr int kRows = Rows;
  static constexpr int kCols = Cols;
  static constexpr int kBytes = Cols / 64 * Block::kBytes;
  static_assert(Cols % 64 == 0);

  T* data;

  __host__ __device__ static unsigned offset(unsigned row, unsigned col) {
    return col / 64 * (Rows * 64) + Block::offset(row, col % 64);
  }
  __host__ __device__ static unsigned offset(unsigned row, unsigned col, unsigned lane_row,
                                             unsigned lane_col) {
    return col / 64 * (Rows * 64) + Block::offset(row, col % 64, lane_row, lane_col);
  }
  __device__ T& at(int row, int col) const { return data[offset(row, col)]; }
  __device__ T& at(int row, int col, int lane_row, int lane_col) const {
    return data[offset(row, col, lane_row, lane_col)];
  }
  __device__ uint32_t address(int row, int col) const { return shared_address(data + offset(row, col)); }
  __device__ uint32_t address(int row, int col, int lane_row, int lane_col) const {
    return shared_address(data + offset(row, col, lane_row, lane_col));
  }
  __device__ Block block(int col) const { return {data + col / 64 * (Rows * 64)}; }
};

// Stores a left factor to 16 rows of a tile from column `col`, a multiple of 16. One base address serves all
// blocks: the column within a block of 64 is combined by xor, the block by addition.
template <typename T, int Cols, int Rows, int K>
__device__ inline void store_blocks(const BlockTile<T, Cols, Rows>& tile, int row, int col,
                                    const AFragment<K>& a) {
#if __CUDA_ARCH__ >= 900
  const uint32_t to = tile.address(row, 0, lane() & 15, (lane() >> 4) * 8);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int at = col + 16 * k;
    stmatrix((to ^ static_cast<uint32_t>(at % 64 * 2)) + at / 64 * BlockTile<T, Cols, Rows>::Block::kBytes,
             a.at[k]);
  }
#else
#pragma unroll
  for (int k = 0; k < K; ++k) store_block(tile, row, col + 16 * k, a.at[k]);
#endif
}

// The index of the warp in its warpgroup.
__device__ inline int warpgroup_warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The dimension of a factor that is contiguous in its tile. k: the inner dimension of the product. mn: the
// rows of a left factor, or the columns of a right factor.
enum class Major { k, mn };

// The wgmma descriptor of a tile at (row, col): start address, 1024 bytes between groups of 8 rows, 128-byte
// swizzle, and for Major::mn the distance to the next 64 columns. The offset is added last, so that a
// constant offset costs one addition for each product.
template <Major major, typename T, int Cols, int Rows>
__device__ inline uint64_t make_descriptor(const BlockTile<T, Cols, Rows>& tile, int row, int col) {
  constexpr uint64_t kNext = major == Major::k ? 1 : BlockTile<T, Cols, Rows>::Block::kBytes / 16;
  constexpr uint64_t kEight = 1024 / 16;
  const uint32_t start = (shared_address(tile.data) & 0x3ffff) >> 4;
  const uint32_t offset = (col / 64 * (Rows * 64) + row * 64 + col % 64) * 2 / 16;
  return (start | kNext << 16 | kEight << 32 | uint64_t{1} << 62) + offset;
}

// The descriptor of 8 x 8 matrices of 128 bytes each, `offset` bytes from `matrices`. leading_bytes
// (leading byte offset) is the distance of neighbouring matrices along the inner dimension of the product,
// stride_bytes (stride byte offset) along the other dimension.
__device__ inline uint64_t make_descriptor(uint32_t matrices, unsigned offset, unsigned leading_bytes,
                                           unsigned stride_bytes) {
  return ((matrices & 0x3ffff) >> 4 | static_cast<uint64_t>(leading_bytes / 16) << 16 |
          static_cast<uint64_t>(stride_bytes / 16) << 32) +
         offset / 16;
}

// d += a b, or without `Add` d = a b, where a is 64 x 16 (registers, or rows of a tile) and b is 16 x N.
// Sign: 1 for b, -1 for -b.
template <typename T, Major major_b, int N = 64, bool Add = true, int Sign = 1>
__device__ inline void wgmma_mma(float (*d)[4], uint64_t a, uint64_t b) {
  ptx::wgmma_mma_async<T, major_b == Major::mn, N, Add, Sign>(d, a, b);
}
template <typename T, Major major_b, int N = 64, bool Add = true, int Sign = 1>
__device__ inline void wgmma_mma(float (*d)[4], const uint32_t (&a)[4], uint64_t b) {
  ptx::wgmma_mma_async<T, major_b == Major::mn, N, Add, Sign>(d, a, b);
}

#endif

// Sets the number of registers of each thread of the warpgroup: warpgroups that need fewer release theirs to
// the others.
template <int Registers>
__device__ inline void setmaxnreg_inc() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::setmaxnreg_inc<Registers>();
#endif
}
template <int Registers>
__device__ inline void setmaxnreg_dec() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::setmaxnreg_dec<Registers>();
#endif
}

// Orders accesses of the thread to shared memory, and accesses that it has synchronised with, before later
// wgmma reads and TMA copies (tma.h).
__device__ inline void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  ptx::fence_proxy_async();
#endif
}

// Forces the compiler to have the sums in their registers at this point.
template <int N>
__device__ inline void pin_registers(Accumulator<N>& sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::pin_registers(sums.at);
#endif
}

// Returns `number` as a value that the compiler knows nothing about, so that values derived from it are
// recomputed instead of being kept live across iterations. (The compiler kept the addresses of an
// unrolled loop in local memory.)
__device__ inline int opaque_value(int number) {
  ptx::make_opaque(number);
  return number;
}

template <int... N>
__device__ inline void wgmma_fence(Accumulator<N>&... sums) {
  (pin_registers(sums), ...);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::wgmma_fence();
#endif
}
__device__ inline void wgmma_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::wgmma_commit_group();
#endif
}
// Waits until at most the latest `Pending` groups are incomplete; `sums` are the results of the completed
// groups.
template <int Pending, int... N>
__device__ inline void wgmma_wait(Accumulator<N>&... sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::wgmma_wait_group<Pending>();
#endif
  (pin_registers(sums), ...);
}

// Fences, calls start(), which starts the products, commits, and waits.
template <class Start, int... N>
__device__ inline void wgmma_run(const Start& start, Accumulator<N>&... sums) {
  wgmma_fence(sums...);
  start();
  wgmma_commit();
  wgmma_wait<0>(sums...);
}

// Keeps a left factor in its registers until this point, after the wait for its products. The products read
// the registers asynchronously, and the compiler would reuse registers without a later use.
template <int K>
__device__ inline void keep_registers(const AFragment<K>& a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  for_each_register<K>([&](int k, int i) { ptx::use_register(a.at[k][i]); });
#endif
}

// to = a, or -a with `Sign` -1; `to` may be `a`.
template <int Sign>
__device__ inline void copy_signed(uint32_t (&to)[4], const uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = a[i] ^ (Sign < 0 ? 0x80008000u : 0u);
}

// sums += x y^T, or without `Add` sums = x y^T. x has 64 rows; y has 8N rows (64 or 32) from `row`. T is
// deduced, so `Add` is the first template argument; in the overload below it is T.
template <bool Add = true, typename T, int N, int Cols, int Rows>
__device__ inline void wgmma_start_transposed(Accumulator<N>& sums, const BlockTile<T, Cols>& x,
                                              const BlockTile<T, Cols, Rows>& y, int row = 0) {
  static_assert(8 * N <= Rows);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_mma<T, Major::k, 8 * N, Add>(sums.at, make_descriptor<Major::k>(x, 0, 0),
                                     make_descriptor<Major::k>(y, row, 0));
#pragma unroll
  for (int col = 16; col < Cols; col += 16) {
    wgmma_mma<T, Major::k, 8 * N>(sums.at, make_descriptor<Major::k>(x, 0, col),
                                  make_descriptor<Major::k>(y, row, col));
  }
#else
  if (!Add) fill(sums, 0.f);
#pragma unroll 4
  for (int col = 0; col < Cols; col += 16) {
    uint32_t a[4];
    load_block(a, x, 16 * warpgroup_warp(), col);
    add_product_transposed<T>(sums, a, y, row, col);
  }
#endif
}

// sums += a y^T, with `Sign` -1 sums -= a y^T, or without `Add` sums = a y^T. y has 8N rows (64 or 32) and
// 16K columns from `col`.
template <typename T, bool Add = true, int Sign = 1, int N, int K, int Cols, int Rows>
__device__ inline void wgmma_start_transposed(Accumulator<N>& sums, const AFragment<K>& a,
                                              const BlockTile<T, Cols, Rows>& y, int col = 0) {
  static_assert(8 * N <= Rows);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_mma<T, Major::k, 8 * N, Add, Sign>(sums.at, a.at[0], make_descriptor<Major::k>(y, 0, col));
#pragma unroll
  for (int k = 1; k < K; ++k) {
    wgmma_mma<T, Major::k, 8 * N, true, Sign>(sums.at, a.at[k],
                                              make_descriptor<Major::k>(y, 0, col + 16 * k));
  }
#else
  if (!Add) fill(sums, 0.f);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    uint32_t left[4];
    copy_signed<Sign>(left, a.at[k]);
    add_product_transposed<T>(sums, left, y, 0, col + 16 * k);
  }
#endif
}

// sums += x[:, x_col..x_col+63] y[0..63, col..col+8N-1], or with `Sign` -1 sums -= ...; N is 4 or a multiple
// of 8.
template <typename T, int Sign = 1, int N, int XCols, int Cols>
__device__ inline void wgmma_start(Accumulator<N>& sums, const BlockTile<T, XCols>& x, int x_col,
                                   const BlockTile<T, Cols>& y, int col = 0) {
#pragma unroll
  for (int k = 0; k < 64; k += 16) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
    for (int n = 0; n < N; n += 8) {
      wgmma_mma<T, Major::mn, N == 4 ? 32 : 64, true, Sign>(sums.at + n,
                                                            make_descriptor<Major::k>(x, 0, x_col + k),
                                                            make_descriptor<Major::mn>(y, k, col + 8 * n));
    }
#else
    uint32_t a[4];
    load_block(a, x, 16 * warpgroup_warp(), x_col + k);
    copy_signed<Sign>(a, a);
    add_product<T>(sums, a, y, k, col);
#endif
  }
}
// sums += a y[row..row+16K-1, col..col+8N-1], or with `Sign` -1 sums -= ...
template <typename T, int Sign = 1, int K, int N, int Cols, int Rows>
__device__ inline void wgmma_start(Accumulator<N>& sums, const AFragment<K>& a,
                                   const BlockTile<T, Cols, Rows>& y, int col = 0, int row = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
    for (int n = 0; n < N; n += 8) {
      wgmma_mma<T, Major::mn, N == 4 ? 32 : 64, true, Sign>(
          sums.at + n, a.at[k], make_descriptor<Major::mn>(y, row + 16 * k, col + 8 * n));
    }
#else
    uint32_t left[4];
    copy_signed<Sign>(left, a.at[k]);
    add_product<T>(sums, left, y, row + 16 * k, col);
#endif
  }
}

// sums += a y[row..row+15, col..col+63]
template <typename T, int Cols, int Rows>
__device__ inline void wgmma_start(Accumulator<8>& sums, const uint32_t (&a)[4],
                                   const BlockTile<T, Cols, Rows>& y, int col, int row) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_mma<T, Major::mn>(sums.at, a, make_descriptor<Major::mn>(y, row, col));
#else
  add_product<T>(sums, a, y, row, col);
#endif
}

}  // namespace girih::kernels

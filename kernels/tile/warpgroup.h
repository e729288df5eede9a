// Products of 64 rows by four warps: the first of them a multiple of 4 in its block, warp w with rows 16 w to
// 16 w + 15, which are laid out as Sums and Operand are. Where the card has products of warpgroups (wgmma,
// sm_90a) the right factor leaves shared memory once for the four, and a left factor there not through
// registers; else each warp goes by itself, mma by mma.
//
// Products are under way from their start to a wait for them:
//
//     fence_products(sums);       the registers are as the products shall find them
//     start_product(sums, ...);
//     commit_products();
//     wait_products<0>(sums);
#pragma once

#include <type_traits>

#include "tile/matrix.h"

namespace girih::kernels {

// 64 x Cols 16-bit elements in blocks of 64 columns: a row of a block is a line of 128 bytes, and the 16-byte
// packs of a line change places with the row, as in a SharedTile. `data` is a multiple of 1024 bytes, for
// wgmma.
template <typename T, int Cols>
struct BlockTile {
  using Element = T;
  using Block = SharedTile<T, 64, 64>;
  static constexpr int kRows = 64;
  static constexpr int kCols = Cols;
  static constexpr int kBytes = Cols / 64 * Block::kBytes;
  static_assert(Cols % 64 == 0);

  T* data;

  __host__ __device__ static unsigned offset(unsigned row, unsigned col) {
    return col / 64 * (64 * 64) + Block::offset(row, col % 64);
  }
  __host__ __device__ static unsigned offset(unsigned row, unsigned col, unsigned lane_row,
                                             unsigned lane_col) {
    return col / 64 * (64 * 64) + Block::offset(row, col % 64, lane_row, lane_col);
  }
  __device__ T& at(int row, int col) const { return data[offset(row, col)]; }
  __device__ T& at(int row, int col, int lane_row, int lane_col) const {
    return data[offset(row, col, lane_row, lane_col)];
  }
  __device__ uint32_t address(int row, int col) const { return shared_address(data + offset(row, col)); }
  __device__ uint32_t address(int row, int col, int lane_row, int lane_col) const {
    return shared_address(data + offset(row, col, lane_row, lane_col));
  }
  __device__ Block block(int col) const { return {data + col / 64 * (64 * 64)}; }
};

// The warp's place in its warpgroup.
__device__ inline int group_warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// What becomes rows of a left factor, or columns of a right one: a tile's rows or its columns.
enum class Lines { rows, columns };

// What wgmma is told of a tile: where it starts, 1024 bytes from 8 rows to the next 8, lines of 128 bytes
// whose packs change places; by columns also where the next 64 of them are.
template <Lines lines, typename T, int Cols>
__device__ inline uint64_t descriptor(const BlockTile<T, Cols>& tile, int row, int col) {
  constexpr uint64_t kNext = lines == Lines::rows ? 1 : BlockTile<T, Cols>::Block::kBytes / 16;
  constexpr uint64_t kEight = 1024 / 16;
  const uint32_t address = shared_address(tile.block(col).data + row * 64 + col % 64);
  return (address & 0x3ffff) >> 4 | kNext << 16 | kEight << 32 | uint64_t{1} << 62;
}

// d += a b, 64 x 16 times 16 x 64 or 16 x 32. a: registers, or a tile's rows.
#define GIRIH_SUMS                                                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define GIRIH_HALF_SUMS "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define GIRIH_EIGHT(n)                                                                              \
  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), "+f"(d[n + 1][1]), \
      "+f"(d[n + 1][2]), "+f"(d[n + 1][3])
#define GIRIH_WGMMA(cols, type) "wgmma.mma_async.sync.aligned.m64n" cols "k16.f32." type "." type " "
#define GIRIH_FROM_TILE(type, by_rows)                                                           \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n" GIRIH_WGMMA("64", type) GIRIH_SUMS \
               ", %32, %33, add, 1, 1, 0, " by_rows ";\n}\n"                                     \
               : GIRIH_EIGHT(0), GIRIH_EIGHT(2), GIRIH_EIGHT(4), GIRIH_EIGHT(6)                  \
               : "l"(a), "l"(b))
#define GIRIH_HALF_FROM_TILE(type)                                                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n" GIRIH_WGMMA("32", type) GIRIH_HALF_SUMS \
               ", %16, %17, add, 1, 1, 0, 0;\n}\n"                                                    \
               : GIRIH_EIGHT(0), GIRIH_EIGHT(2)                                                       \
               : "l"(a), "l"(b))
#define GIRIH_FROM_REGISTERS(type)                                                               \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n" GIRIH_WGMMA("64", type) GIRIH_SUMS \
               ", {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}\n"                                 \
               : GIRIH_EIGHT(0), GIRIH_EIGHT(2), GIRIH_EIGHT(4), GIRIH_EIGHT(6)                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <typename T, Lines of_b>
__device__ inline void group_mma(float (*d)[4], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __half> && of_b == Lines::rows) {
    GIRIH_FROM_TILE("f16", "0");
  } else if constexpr (std::is_same_v<T, __half>) {
    GIRIH_FROM_TILE("f16", "1");
  } else if constexpr (of_b == Lines::rows) {
    GIRIH_FROM_TILE("bf16", "0");
  } else {
    GIRIH_FROM_TILE("bf16", "1");
  }
}
// Rows of both.
template <typename T>
__device__ inline void group_mma(Sums<8>& sums, uint64_t a, uint64_t b) {
  group_mma<T, Lines::rows>(sums.at, a, b);
}
template <typename T>
__device__ inline void group_mma(Sums<4>& sums, uint64_t a, uint64_t b) {
  float(&d)[4][4] = sums.at;
  if constexpr (std::is_same_v<T, __half>) {
    GIRIH_HALF_FROM_TILE("f16");
  } else {
    GIRIH_HALF_FROM_TILE("bf16");
  }
}
template <typename T>
__device__ inline void group_mma(float (*d)[4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    GIRIH_FROM_REGISTERS("f16");
  } else {
    GIRIH_FROM_REGISTERS("bf16");
  }
}

#undef GIRIH_SUMS
#undef GIRIH_HALF_SUMS
#undef GIRIH_EIGHT
#undef GIRIH_WGMMA
#undef GIRIH_FROM_TILE
#undef GIRIH_HALF_FROM_TILE
#undef GIRIH_FROM_REGISTERS

#endif

// What the thread has written to shared memory, or seen written, products started later find there.
__device__ inline void fence_tiles() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

// The compiler has the sums in their registers here.
template <int N>
__device__ inline void pin(Sums<N>& sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums.at[n][i])::"memory");
  }
#endif
}

template <int... N>
__device__ inline void fence_products(Sums<N>&... sums) {
  (pin(sums), ...);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}
__device__ inline void commit_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}
// Waits until at most `Pending` of the latest commits are under way; `sums` are theirs that are not.
template <int Pending, int... N>
__device__ inline void wait_products(Sums<N>&... sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
#endif
  (pin(sums), ...);
}

// sums += x y^T: 64 rows of x, of y 64 or 32 from `row` on.
template <typename T, int N, int Cols>
__device__ inline void start_product_transposed(Sums<N>& sums, const BlockTile<T, Cols>& x,
                                                const BlockTile<T, Cols>& y, int row = 0) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
  for (int col = 0; col < Cols; col += 16) {
    group_mma<T>(sums, descriptor<Lines::rows>(x, 0, col), descriptor<Lines::rows>(y, row, col));
  }
#else
#pragma unroll 4
  for (int col = 0; col < Cols; col += 16) {
    uint32_t a[4];
    load_block(a, x, 16 * group_warp(), col);
    add_product_transposed<T>(sums, a, y, row, col);
  }
#endif
}

// sums[:, 0..8N-1] += x y: columns from `x_col` on of x, 64; from `col` on of y, 64 rows of it.
template <typename T, int N, int XCols, int Cols>
__device__ inline void start_product(Sums<N>& sums, const BlockTile<T, XCols>& x, int x_col,
                                     const BlockTile<T, Cols>& y, int col = 0) {
#pragma unroll
  for (int k = 0; k < 64; k += 16) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
    for (int n = 0; n < N; n += 8) {
      group_mma<T, Lines::columns>(sums.at + n, descriptor<Lines::rows>(x, 0, x_col + k),
                                   descriptor<Lines::columns>(y, k, col + 8 * n));
    }
#else
    uint32_t a[4];
    load_block(a, x, 16 * group_warp(), x_col + k);
    add_product<T>(sums, a, y, k, col);
#endif
  }
}
// 16 K rows of y, from `row` on.
template <typename T, int K, int N, int Cols>
__device__ inline void start_product(Sums<N>& sums, const Operand<K>& a, const BlockTile<T, Cols>& y,
                                     int col = 0, int row = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
    for (int n = 0; n < N; n += 8) {
      group_mma<T>(sums.at + n, a.at[k], descriptor<Lines::columns>(y, row + 16 * k, col + 8 * n));
    }
#else
    add_product<T>(sums, a.at[k], y, row + 16 * k, col);
#endif
  }
}

}  // namespace girih::kernels

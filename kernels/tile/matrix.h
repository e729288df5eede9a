// A warp's matrices in registers, and their products on the tensor cores (mma.sync m16n8k16, operands of 16
// bits, sums in fp32).
//
// Sums<N> is a 16 x 8N matrix of fp32, Operand<K> the left factor of a product, 16 x 16K of 16-bit elements.
// Both keep the hardware's layout: lane l has rows l / 4 and l / 4 + 8, and of every 8 columns the two that
// start at 2 (l % 4). So the sums of one product become the left factor of the next by rounding alone. Right
// factors are tiles in shared memory, or 16 rows of one that were fetched ahead, an Operand too (load_right).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tile/shared.h"

namespace girih::kernels {

__device__ inline int lane() { return threadIdx.x & 31; }
__device__ inline int lane_row() { return (threadIdx.x & 31) >> 2; }  // and 8 below it
__device__ inline int lane_col() { return (threadIdx.x & 3) << 1; }   // and the one right of it

// The warp's number in its block, in a way that tells the compiler that it is the same for all lanes:
// branches by it, and what follows from it, then need no care for lanes that part.
__device__ inline int warp_index() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

// The lane's element of an 8 x 8 block: (row + lane_row(), col + lane_col()).
template <class Tile>
__device__ inline typename Tile::Element& lane_at(const Tile& tile, int row, int col) {
  return tile.at(row, col, lane_row(), lane_col());
}

// at[n][2 * i + j]: row lane_row() + 8 i, column 8 n + lane_col() + j.
template <int N>
struct Sums {
  float at[N][4];
};

template <int K>
struct Operand {
  uint32_t at[K][4];
};

// f(n, i) for a lane's [n][i] of a Sums<N>, its rows 8 (i / 2), columns 8 n + i % 2, or of an Operand<N>.
template <int N, class F>
__device__ inline void each_sum(const F& f) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(n, i);
  }
}
// Of a Sums<N> in pairs, i their row: [n][2 i] and [n][2 i + 1]; or i their column: [n][i] and [n][2 + i].
template <int N, class F>
__device__ inline void each_pair(const F& f) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) f(n, i);
  }
}

template <int N>
__device__ inline void fill(Sums<N>& sums, float value) {
  each_sum<N>([&](int n, int i) { sums.at[n][i] = value; });
}

// Two neighbouring elements as one register; the first in the low half.
template <typename T>
__device__ inline uint32_t pair_of(float low, float high);
template <>
__device__ inline uint32_t pair_of<__nv_bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ inline uint32_t pair_of<__half>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <typename T>
__device__ inline float2 unpaired(uint32_t pair);
template <>
__device__ inline float2 unpaired<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ inline float2 unpaired<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Four 8 x 8 matrices whose rows start at the lanes' addresses.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// Four 8 x 8 matrices whose rows start at the lanes' addresses.
__device__ inline void put_matrices(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
#endif

// Four 8 x 8 matrices one after another, 128 bytes each.
__device__ inline void store_matrices(void* to, const uint32_t (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  put_matrices(shared_address(to) + lane() * 16, x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) static_cast<uint32_t*>(to)[32 * i + lane()] = x[i];
#endif
}

// An 8 x 8 matrix of pairs, transposed.
__device__ inline uint32_t transpose_pairs(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

// d += a b, a 16 x 16, b 16 x 8.
template <typename T>
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four registers of the four lanes that share rows, turned: the quad's lane i gets register i of all four.
__device__ inline void turn_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane() & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step);
      (upper ? x[i] : x[i + step]) = got;
    }
  }
}

// The 16 x 16 of a tile at (row, col) as a left factor.
template <class Tile>
__device__ inline void load_block(uint32_t (&a)[4], const Tile& tile, int row, int col) {
  load_matrices(a, tile.address(row, col, lane() & 15, (lane() >> 4) * 8));
}
// And back: a left factor to its place in a tile.
template <class Tile>
__device__ inline void store_block(const Tile& tile, int row, int col, const uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 900
  put_matrices(tile.address(row, col, lane() & 15, (lane() >> 4) * 8), a);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint32_t*>(&lane_at(tile, row + i % 2 * 8, col + i / 2 * 8)) = a[i];
  }
#endif
}
// All blocks of a left factor.
template <class Tile, int K>
__device__ inline void load_blocks(Operand<K>& a, const Tile& tile, int row = 0, int col = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) load_block(a.at[k], tile, row, col + 16 * k);
}
template <class Tile, int K>
__device__ inline void store_blocks(const Tile& tile, int row, int col, const Operand<K>& a) {
#pragma unroll
  for (int k = 0; k < K; ++k) store_block(tile, row, col + 16 * k, a.at[k]);
}
// A block of the tile's transpose as a left factor: its rows are columns of the tile.
template <class Tile>
__device__ inline void load_block_transposed(uint32_t (&a)[4], const Tile& tile, int row, int col) {
  const int l = lane();
  load_matrices_transposed(a, tile.address(col, row, (l & 7) + (l >> 4) * 8, ((l >> 3) & 1) * 8));
}

// The same with its columns weighed, column i of the 16 by weights[i], and rounded again.
template <typename T, class Tile>
__device__ inline void load_weighed_transposed(uint32_t (&a)[4], const Tile& tile, int row, int col,
                                               const float* weights) {
  load_block_transposed(a, tile, row, col);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 w = *reinterpret_cast<const float2*>(weights + 8 * half + lane_col());
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = unpaired<T>(a[2 * half + i]);
      a[2 * half + i] = pair_of<T>(w.x * x.x, w.y * x.y);
    }
  }
}

// Columns 8n..8n+16K-1 of sums rounded to T, as a left factor.
template <typename T, int K, int N>
__device__ inline void round_to(Operand<K>& a, const Sums<N>& sums, int n = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    a.at[k][0] = pair_of<T>(sums.at[n + 2 * k][0], sums.at[n + 2 * k][1]);
    a.at[k][1] = pair_of<T>(sums.at[n + 2 * k][2], sums.at[n + 2 * k][3]);
    a.at[k][2] = pair_of<T>(sums.at[n + 2 * k + 1][0], sums.at[n + 2 * k + 1][1]);
    a.at[k][3] = pair_of<T>(sums.at[n + 2 * k + 1][2], sums.at[n + 2 * k + 1][3]);
  }
}

// sums += others, element by element.
template <int N>
__device__ inline void add(Sums<N>& sums, const Sums<N>& others) {
  each_sum<N>([&](int n, int i) { sums.at[n][i] += others.at[n][i]; });
}

// sums *= factors, element by element.
template <int N>
__device__ inline void multiply(Sums<N>& sums, const Sums<N>& factors) {
  each_sum<N>([&](int n, int i) { sums.at[n][i] *= factors.at[n][i]; });
}

// Row lane_row() times by.x, the one 8 further times by.y.
template <int N>
__device__ inline void scale_rows(Sums<N>& x, float2 by) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x.at[n][0] *= by.x, x.at[n][1] *= by.x, x.at[n][2] *= by.y, x.at[n][3] *= by.y;
  }
}

// sums *= factors, `factors(n)` those of columns 8n + lane_col() and the next.
template <int N, class Factors>
__device__ inline void scale_columns(Sums<N>& sums, const Factors& factors) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 factor = factors(n);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.at[n][i] *= i & 1 ? factor.y : factor.x;
  }
}

// sums[i] += a[i] b, b = tile[row..row+15, col..col+8N-1], which is fetched once for all of them.
template <typename T, int N, int A, class Tile>
__device__ inline void add_products(Sums<N> (&sums)[A], const uint32_t (&a)[A][4], const Tile& tile, int row,
                                    int col = 0) {
  const int l = lane();
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t b[4];
    load_matrices_transposed(b, tile.address(row, col + 8 * n, l & 15, (l >> 4) * 8));
#pragma unroll
    for (int i = 0; i < A; ++i) {
      mma<T>(sums[i].at[n], a[i], b[0], b[1]);
      mma<T>(sums[i].at[n + 1], a[i], b[2], b[3]);
    }
  }
}
// sums[i] += a[i] b^T, b = tile[row..row+8N-1, col..col+15]
template <typename T, int N, int A, class Tile>
__device__ inline void add_products_transposed(Sums<N> (&sums)[A], const uint32_t (&a)[A][4],
                                               const Tile& tile, int row, int col) {
  const int l = lane();
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t b[4];
    load_matrices(b, tile.address(row + 8 * n, col, (l & 7) + (l >> 4) * 8, ((l >> 3) & 1) * 8));
#pragma unroll
    for (int i = 0; i < A; ++i) {
      mma<T>(sums[i].at[n], a[i], b[0], b[1]);
      mma<T>(sums[i].at[n + 1], a[i], b[2], b[3]);
    }
  }
}

// The same of one.
template <typename T, int N, class Tile>
__device__ inline void add_product(Sums<N>& sums, const uint32_t (&a)[4], const Tile& tile, int row,
                                   int col = 0) {
  add_products<T>(reinterpret_cast<Sums<N>(&)[1]>(sums), reinterpret_cast<const uint32_t(&)[1][4]>(a), tile,
                  row, col);
}
template <typename T, int N, class Tile>
__device__ inline void add_product_transposed(Sums<N>& sums, const uint32_t (&a)[4], const Tile& tile,
                                              int row, int col) {
  add_products_transposed<T>(reinterpret_cast<Sums<N>(&)[1]>(sums),
                             reinterpret_cast<const uint32_t(&)[1][4]>(a), tile, row, col);
}

// sums += a tile[row.., col..], all K blocks of a.
template <typename T, int N, int K, class Tile>
__device__ inline void add_product(Sums<N>& sums, const Operand<K>& a, const Tile& tile, int row = 0,
                                   int col = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) add_product<T>(sums, a.at[k], tile, row + 16 * k, col);
}

// sums += a tile[row.., col..]^T
template <typename T, int N, int K, class Tile>
__device__ inline void add_product_transposed(Sums<N>& sums, const Operand<K>& a, const Tile& tile,
                                              int row = 0, int col = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) add_product_transposed<T>(sums, a.at[k], tile, row, col + 16 * k);
}

// sums += x[row..row+15, all] y[all, col..col+8N-1], tiles both, `Unroll` turns of the loop at a time.
template <int Unroll, int N, class X, class Y>
__device__ inline void add_product_of_tiles(Sums<N>& sums, const X& x, int row, const Y& y, int col) {
#pragma unroll Unroll
  for (int k = 0; k < X::kCols; k += 16) {
    uint32_t a[4];
    load_block(a, x, row, k);
    add_product<typename X::Element>(sums, a, y, k, col);
  }
}
// sums += x[row..row+15, all] y[col..col+8N-1, all]^T
template <int Unroll, int N, class X, class Y>
__device__ inline void add_product_of_tile_rows(Sums<N>& sums, const X& x, int row, const Y& y, int col) {
#pragma unroll Unroll
  for (int k = 0; k < X::kCols; k += 16) {
    uint32_t a[4];
    load_block(a, x, row, k);
    add_product_transposed<typename X::Element>(sums, a, y, col, k);
  }
}

// 16 rows of a tile as a right factor that is fetched ahead, and sums += a b with it.
template <class Tile, int K>
__device__ inline void load_right(Operand<K>& b, const Tile& tile) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    load_matrices_transposed(b.at[k], tile.address(0, 16 * k, lane() & 15, (lane() >> 4) * 8));
  }
}
template <typename T, int N, int K>
__device__ inline void add_product(Sums<N>& sums, const uint32_t (&a)[4], const Operand<K>& b) {
  static_assert(N == 2 * K);
#pragma unroll
  for (int n = 0; n < N; ++n) mma<T>(sums.at[n], a, b.at[n / 2][2 * (n % 2)], b.at[n / 2][2 * (n % 2) + 1]);
}

// The sum over the four lanes that share rows.
__device__ inline float sum_over_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ inline float max_over_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
// The sum over the eight lanes that share columns.
__device__ inline float sum_over_col(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x in one instruction, of an x that is no less than the smallest normal number; 0 beyond 2^126.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
// x / y for a y that is no less than the smallest normal number, nor more than 2^126: what __fdividef does
// for others is three more instructions.
__device__ inline float divide_fast(float x, float y) { return x * reciprocal(y); }
constexpr float kLog2E = 1.4426950408889634f;

}  // namespace girih::kernels

// Matrices in the registers of a warp, and their products on the tensor cores: mma.sync m16n8k16, 16-bit
// elements, fp32 accumulation.
//
// Accumulator<N> is the C fragment, a 16 x 8N matrix of fp32. AFragment<K> is the A fragment, the left factor
// of a product, 16 x 16K elements of 16 bits. Both have the layout of the hardware: lane l has rows l / 4 and
// l / 4 + 8, and of every 8 columns the two from 2 (l % 4). Rounding turns the C fragment of one product into
// the A fragment of the next without an exchange between lanes. Right factors are tiles in shared memory, or
// 16 rows of a tile loaded to registers in advance, a BFragment.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tile/shared.h"

namespace girih::kernels {

__device__ inline int lane() { return threadIdx.x & 31; }
__device__ inline int lane_row() { return (threadIdx.x & 31) >> 2; }  // and this + 8
__device__ inline int lane_col() { return (threadIdx.x & 3) << 1; }   // and this + 1

// The index of the warp in its block. The shuffle tells the compiler that the index is the same in all lanes,
// so that branches on it are uniform.
__device__ inline int warp_index() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

// The element of the lane in an 8 x 8 block: (row + lane_row(), col + lane_col()).
template <class Tile>
__device__ inline typename Tile::Element& lane_element(const Tile& tile, int row, int col) {
  return tile.at(row, col, lane_row(), lane_col());
}

// at[n][2 * i + j] is at row lane_row() + 8 i, column 8 n + lane_col() + j.
template <int N>
struct Accumulator {
  float at[N][4];
};

template <int K>
struct AFragment {
  uint32_t at[K][4];
};

// K blocks of 16 x 16 elements as a right factor: at[k][2 j] and at[k][2 j + 1] are the registers b0 and b1
// of an mma. There are two layouts:
//   load_b_fragment      a b: b has 16 rows; block k and j select columns 16 k + 8 j to 16 k + 8 j + 7
//   round_to_b_fragment  a b^T (pipe/state_store.h): b has 16 rows; block k selects 16 columns, the inner
//                        dimension, and j selects rows 8 j to 8 j + 7
template <int K>
using BFragment = AFragment<K>;

// Calls f(n, i) for every element [n][i] of an Accumulator<N> (row offset 8 (i / 2), column offset 8 n + i %
// 2) or of an AFragment<N>.
template <int N, class F>
__device__ inline void for_each_register(const F& f) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(n, i);
  }
}
// Calls f(n, i) for every pair of elements of an Accumulator<N>: the pairs of a row, [n][2 i] and [n][2 i +
// 1], or the pairs of a column, [n][i] and [n][2 + i].
template <int N, class F>
__device__ inline void for_each_register_pair(const F& f) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) f(n, i);
  }
}

template <int N>
__device__ inline void fill(Accumulator<N>& sums, float value) {
  for_each_register<N>([&](int n, int i) { sums.at[n][i] = value; });
}

// Two neighbouring elements as one register, the first in the low half.
template <typename T>
__device__ inline uint32_t pack_pair(float low, float high);
template <>
__device__ inline uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  return ptx::cvt_rn_bf16x2(high, low);
}
template <>
__device__ inline uint32_t pack_pair<__half>(float low, float high) {
  return ptx::cvt_rn_f16x2(high, low);
}

template <typename T>
__device__ inline float2 unpack_pair(uint32_t pair);
template <>
__device__ inline float2 unpack_pair<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ inline float2 unpack_pair<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Loads four 8 x 8 matrices; lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i.
__device__ inline void ldmatrix(uint32_t (&to)[4], uint32_t address) { ptx::ldmatrix_x4(to, address); }
__device__ inline void ldmatrix_trans(uint32_t (&to)[4], uint32_t address) {
  ptx::ldmatrix_x4_trans(to, address);
}

#if __CUDA_ARCH__ >= 900
// Stores four 8 x 8 matrices; lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i.
__device__ inline void stmatrix(uint32_t address, const uint32_t (&x)[4]) { ptx::stmatrix_x4(address, x); }
#endif

// Stores four 8 x 8 matrices of 128 bytes each contiguously.
__device__ inline void stmatrix_contiguous(void* to, const uint32_t (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  stmatrix(shared_address(to) + lane() * 16, x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) static_cast<uint32_t*>(to)[32 * i + lane()] = x[i];
#endif
}

// Transposes an 8 x 8 matrix of 16-bit elements; a register holds two neighbours of a row.
__device__ inline uint32_t transpose_pairs(uint32_t x) { return ptx::movmatrix_trans(x); }

// d += a b, where a is 16 x 16 and b is 16 x 8.
template <typename T>
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k16_bf16(d, a, b0, b1);
}
template <>
__device__ inline void mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k16_f16(d, a, b0, b1);
}

// Transposes four registers across the four lanes that share rows: lane i of the quad gets register i of all
// four.
__device__ inline void transpose_quad(uint32_t (&x)[4]) {
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

// Loads the 16 x 16 block of a tile at (row, col) as a left factor.
template <class Tile>
__device__ inline void load_block(uint32_t (&a)[4], const Tile& tile, int row, int col) {
  ldmatrix(a, tile.address(row, col, lane() & 15, (lane() >> 4) * 8));
}
// Stores a left factor to the 16 x 16 block of a tile at (row, col).
template <class Tile>
__device__ inline void store_block(const Tile& tile, int row, int col, const uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 900
  stmatrix(tile.address(row, col, lane() & 15, (lane() >> 4) * 8), a);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint32_t*>(&lane_element(tile, row + i % 2 * 8, col + i / 2 * 8)) = a[i];
  }
#endif
}
// The same for all K blocks of a left factor.
template <class Tile, int K>
__device__ inline void load_blocks(AFragment<K>& a, const Tile& tile, int row = 0, int col = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) load_block(a.at[k], tile, row, col + 16 * k);
}
template <class Tile, int K>
__device__ inline void store_blocks(const Tile& tile, int row, int col, const AFragment<K>& a) {
#pragma unroll
  for (int k = 0; k < K; ++k) store_block(tile, row, col + 16 * k, a.at[k]);
}
// Loads the 16 x 16 block at (row, col) of the transpose of a tile as a left factor.
template <class Tile>
__device__ inline void load_block_transposed(uint32_t (&a)[4], const Tile& tile, int row, int col) {
  const int l = lane();
  ldmatrix_trans(a, tile.address(col, row, (l & 7) + (l >> 4) * 8, ((l >> 3) & 1) * 8));
}

// The same with column i of the block multiplied by weights[i] and rounded again.
template <typename T, class Tile>
__device__ inline void load_scaled_transposed(uint32_t (&a)[4], const Tile& tile, int row, int col,
                                              const float* weights) {
  load_block_transposed(a, tile, row, col);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 w = *reinterpret_cast<const float2*>(weights + 8 * half + lane_col());
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = unpack_pair<T>(a[2 * half + i]);
      a[2 * half + i] = pack_pair<T>(w.x * x.x, w.y * x.y);
    }
  }
}

// Rounds columns 8n..8n+16K-1 of sums to T, as a left factor.
template <typename T, int K, int N>
__device__ inline void round_to_a_fragment(AFragment<K>& a, const Accumulator<N>& sums, int n = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    a.at[k][0] = pack_pair<T>(sums.at[n + 2 * k][0], sums.at[n + 2 * k][1]);
    a.at[k][1] = pack_pair<T>(sums.at[n + 2 * k][2], sums.at[n + 2 * k][3]);
    a.at[k][2] = pack_pair<T>(sums.at[n + 2 * k + 1][0], sums.at[n + 2 * k + 1][1]);
    a.at[k][3] = pack_pair<T>(sums.at[n + 2 * k + 1][2], sums.at[n + 2 * k + 1][3]);
  }
}

// sums += others, element by element.
template <int N>
__device__ inline void add(Accumulator<N>& sums, const Accumulator<N>& others) {
  for_each_register<N>([&](int n, int i) { sums.at[n][i] += others.at[n][i]; });
}

// sums *= factors, element by element.
template <int N>
__device__ inline void multiply(Accumulator<N>& sums, const Accumulator<N>& factors) {
  for_each_register<N>([&](int n, int i) { sums.at[n][i] *= factors.at[n][i]; });
}

// Multiplies row lane_row() by by.x and row lane_row() + 8 by by.y.
template <int N>
__device__ inline void scale_rows(Accumulator<N>& x, float2 by) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x.at[n][0] *= by.x, x.at[n][1] *= by.x, x.at[n][2] *= by.y, x.at[n][3] *= by.y;
  }
}

// Multiplies every column by a factor. factors(n) returns those of columns 8n + lane_col() and 8n +
// lane_col() + 1.
template <int N, class Factors>
__device__ inline void scale_columns(Accumulator<N>& sums, const Factors& factors) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 factor = factors(n);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.at[n][i] *= i & 1 ? factor.y : factor.x;
  }
}

// sums[i] += a[i] b for all i, where b = tile[row..row+15, col..col+8N-1] is loaded once.
template <typename T, int N, int A, class Tile>
__device__ inline void add_products(Accumulator<N> (&sums)[A], const uint32_t (&a)[A][4], const Tile& tile,
                                    int row, int col = 0) {
  const int l = lane();
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t b[4];
    ldmatrix_trans(b, tile.address(row, col + 8 * n, l & 15, (l >> 4) * 8));
#pragma unroll
    for (int i = 0; i < A; ++i) {
      mma<T>(sums[i].at[n], a[i], b[0], b[1]);
      mma<T>(sums[i].at[n + 1], a[i], b[2], b[3]);
    }
  }
}
// sums[i] += a[i] b^T for all i, where b = tile[row..row+8N-1, col..col+15]
template <typename T, int N, int A, class Tile>
__device__ inline void add_products_transposed(Accumulator<N> (&sums)[A], const uint32_t (&a)[A][4],
                                               const Tile& tile, int row, int col) {
  const int l = lane();
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t b[4];
    ldmatrix(b, tile.address(row + 8 * n, col, (l & 7) + (l >> 4) * 8, ((l >> 3) & 1) * 8));
#pragma unroll
    for (int i = 0; i < A; ++i) {
      mma<T>(sums[i].at[n], a[i], b[0], b[1]);
      mma<T>(sums[i].at[n + 1], a[i], b[2], b[3]);
    }
  }
}

// The same for one left factor.
template <typename T, int N, class Tile>
__device__ inline void add_product(Accumulator<N>& sums, const uint32_t (&a)[4], const Tile& tile, int row,
                                   int col = 0) {
  add_products<T>(reinterpret_cast<Accumulator<N>(&)[1]>(sums), reinterpret_cast<const uint32_t(&)[1][4]>(a),
                  tile, row, col);
}
template <typename T, int N, class Tile>
__device__ inline void add_product_transposed(Accumulator<N>& sums, const uint32_t (&a)[4], const Tile& tile,
                                              int row, int col) {
  add_products_transposed<T>(reinterpret_cast<Accumulator<N>(&)[1]>(sums),
                             reinterpret_cast<const uint32_t(&)[1][4]>(a), tile, row, col);
}

// sums += a tile[row..row+16K-1, col..col+8N-1]
template <typename T, int N, int K, class Tile>
__device__ inline void add_product(Accumulator<N>& sums, const AFragment<K>& a, const Tile& tile, int row = 0,
                                   int col = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) add_product<T>(sums, a.at[k], tile, row + 16 * k, col);
}

// sums += a tile[row..row+8N-1, col..col+16K-1]^T
template <typename T, int N, int K, class Tile>
__device__ inline void add_product_transposed(Accumulator<N>& sums, const AFragment<K>& a, const Tile& tile,
                                              int row = 0, int col = 0) {
#pragma unroll
  for (int k = 0; k < K; ++k) add_product_transposed<T>(sums, a.at[k], tile, row, col + 16 * k);
}

// sums += x[row..row+15, :] y[:, col..col+8N-1] for tiles x and y; the loop is unrolled `Unroll` times.
template <int Unroll, int N, class X, class Y>
__device__ inline void add_tile_product(Accumulator<N>& sums, const X& x, int row, const Y& y, int col) {
#pragma unroll Unroll
  for (int k = 0; k < X::kCols; k += 16) {
    uint32_t a[4];
    load_block(a, x, row, k);
    add_product<typename X::Element>(sums, a, y, k, col);
  }
}
// sums += x[row..row+15, :] y[col..col+8N-1, :]^T
template <int Unroll, int N, class X, class Y>
__device__ inline void add_tile_product_transposed(Accumulator<N>& sums, const X& x, int row, const Y& y,
                                                   int col) {
#pragma unroll Unroll
  for (int k = 0; k < X::kCols; k += 16) {
    uint32_t a[4];
    load_block(a, x, row, k);
    add_product_transposed<typename X::Element>(sums, a, y, col, k);
  }
}

// Loads the first 16 rows of a tile as a right factor b in registers, for sums += a b below.
template <class Tile, int K>
__device__ inline void load_b_fragment(BFragment<K>& b, const Tile& tile) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    ldmatrix_trans(b.at[k], tile.address(0, 16 * k, lane() & 15, (lane() >> 4) * 8));
  }
}
template <typename T, int N, int K>
__device__ inline void add_product(Accumulator<N>& sums, const uint32_t (&a)[4], const BFragment<K>& b) {
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

__device__ inline float exp2_fast(float x) { return ptx::ex2_approx_ftz(x); }
// 1 / x in one instruction, for x no less than the smallest normal number; 0 for x > 2^126.
__device__ inline float reciprocal(float x) { return ptx::rcp_approx_ftz(x); }
// x / y for y between the smallest normal number and 2^126. __fdividef takes three more instructions for
// other y.
__device__ inline float divide_fast(float x, float y) { return x * reciprocal(y); }
constexpr float kLog2E = 1.4426950408889634f;

}  // namespace girih::kernels

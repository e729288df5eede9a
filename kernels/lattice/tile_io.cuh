// Copies of rows between global and shared memory, and products by the blocks of a triangle.
#pragma once

#include <type_traits>

#include "lattice/kernels.h"
#include "tile/launch.h"
#include "tile/matrix.h"
#include "tile/pack.h"
#include "tile/row_store.h"

namespace girih::kernels::lattice {

// Makes x unknown to the compiler: it then computes addresses from x where they are used, not ahead of the
// surrounding loops, where they would occupy too many registers.
__device__ inline int opaque(int x) {
  ptx::make_opaque(x);
  return x;
}

// Makes the compiler compute x here, and treat the value as unknown afterwards.
__device__ inline void make_opaque(uint32_t& x) { ptx::make_opaque(x); }

// Pointer to a head's row; the columns are contiguous.
template <typename T>
__device__ inline const T* row_of(const InputTensor<4>& in, int64_t batch, int64_t token, int64_t head) {
  return static_cast<const T*>(in.data) + offset_of(in, batch, token, head);
}
template <typename T>
__device__ inline T* row_of(const OutputTensor<4>& out, int64_t batch, int64_t token, int64_t head) {
  return static_cast<T*>(out.data) + offset_of(out, batch, token, head);
}

// Starts the copies of a matrix, by all threads; zeros in the rest of the tile.
template <int Threads, class Tile>
__device__ inline void load_by_block(const Tile& tile, const typename Tile::Element* from, int64_t stride,
                                     int rows, int cols) {
  constexpr int kPacks = Tile::kRows * static_cast<int>(Tile::kPacks),
                kUsed = kPacks < Threads ? kPacks : Threads;
  if (static_cast<int>(threadIdx.x) < kUsed) load_async<kUsed>(tile, from, stride, rows, cols, threadIdx.x);
}

// The same by one warp: a whole tile has a separate path without bounds.
template <class Tile>
__device__ inline void load_by_warp(const Tile& tile, const typename Tile::Element* from, int64_t stride,
                                    int rows, int cols) {
  constexpr int kAtOnce = Tile::kRows < 32 ? Tile::kRows : 32;
  using Few = SharedTile<typename Tile::Element, kAtOnce, Tile::kCols>;
  const bool whole = rows >= Tile::kRows && cols >= Tile::kCols;
#pragma unroll 1
  for (int row = 0; row < Tile::kRows; row += kAtOnce) {
    const Few few{tile.data + row * Tile::kCols};
    if (whole) {
      load_async<32>(few, from + row * stride, stride, kAtOnce, Tile::kCols, lane());
    } else {
      load_async<32>(few, from + row * stride, stride, rows - row, cols, lane());
    }
  }
}

// A 16 x 16 block that is loaded from or stored to global memory, in the registers of an A fragment: the four
// lanes of a row exchange registers, so that a lane has 16 bytes of one row.
__device__ inline int pack_row() { return lane_row() + (lane() & 2) * 4; }
__device__ inline int pack_col() { return (lane() & 1) * 8; }

// An A fragment has (row, col), (row + 8, col), (row, col + 8), ...; the lane's 16 bytes are of row + 8 (lane
// / 2 % 2).
__device__ inline void fragment_to_rows(uint32_t (&a)[4]) {
  const uint32_t middle = a[1];
  a[1] = a[2], a[2] = middle;
  transpose_quad(a);
}
__device__ inline void rows_to_fragment(uint32_t (&a)[4]) {
  transpose_quad(a);
  const uint32_t middle = a[1];
  a[1] = a[2], a[2] = middle;
}
// Transposes an A fragment.
__device__ inline void transpose_block(uint32_t (&a)[4]) {
  const uint32_t middle = transpose_pairs(a[1]);
  a[0] = transpose_pairs(a[0]);
  a[1] = transpose_pairs(a[2]);
  a[2] = middle;
  a[3] = transpose_pairs(a[3]);
}

// Stores 16 rows and columns of a matrix, of which `rows` and `cols` exist.
template <typename T>
__device__ inline void store_block_global(T* to, int64_t stride, int rows, int cols, uint32_t (&a)[4]) {
  fragment_to_rows(a);
  const int row = pack_row(), col = pack_col();
  if (row < rows && col < cols) store_pack(to + row * stride + col, a);
}
template <typename T>
__device__ inline void load_block_global(uint32_t (&a)[4], const T* from, int64_t stride, int rows,
                                         int cols) {
  const int row = pack_row(), col = pack_col();
  uint4 x = {0, 0, 0, 0};
  if (row < rows && col < cols) x = *reinterpret_cast<const uint4*>(from + row * stride + col);
  a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  rows_to_fragment(a);
}

// Stores all columns of 16 rows, of which `rows` and `cols` exist.
template <typename T, int N>
__device__ inline void store_rows_global(T* to, int64_t stride, int rows, int cols,
                                         const Accumulator<N>& sums) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    AFragment<1> a;
    round_to_a_fragment<T>(a, sums, n);
    store_block_global(to + 8 * n, stride, rows, cols - 8 * n, a.at[0]);
  }
}
// sums += a matrix's rows
template <typename T, int N>
__device__ inline void add_rows(Accumulator<N>& sums, const T* from, int64_t stride, int rows, int cols) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t a[4];
    load_block_global(a, from + 8 * n, stride, rows, cols - 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair<T>(a[i]);
      sums.at[n + i / 2][i % 2 * 2] += x.x, sums.at[n + i / 2][i % 2 * 2 + 1] += x.y;
    }
  }
}

// Clamps x to the range of T. (bf16 has the range of fp32.)
template <typename T>
__device__ inline float clamp_to_type(float x) {
  return std::is_same_v<T, __half> ? fminf(fmaxf(x, -65504.f), 65504.f) : x;
}

// Clamps the factor of a product. Where a chunk's tokens repeat, gradients are noise that may exceed fp16;
// clamping avoids infinities.
template <typename T, int N>
__device__ inline void clamp_factor(Accumulator<N>& sums) {
  if constexpr (std::is_same_v<T, __half>) {
    for_each_register<N>([&](int n, int i) { sums.at[n][i] = clamp_to_type<T>(sums.at[n][i]); });
  }
}

// Converts an A fragment to fp32.
template <typename T>
__device__ inline void unpack(Accumulator<2>& to, const uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack_pair<T>(a[i]);
    to.at[i / 2][i % 2 * 2] = x.x, to.at[i / 2][i % 2 * 2 + 1] = x.y;
  }
}
template <typename T>
__device__ inline void pack(uint32_t (&to)[4], const Accumulator<2>& sums) {
  AFragment<1> a;
  round_to_a_fragment<T>(a, sums);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = a.at[0][i];
}

// Replaces elements by f(element, row, col), for 16 x 8N elements from (row, col) on.
template <int N, class F>
__device__ inline void map_elements(Accumulator<N>& sums, int row, int col, const F& f) {
  for_each_register<N>([&](int n, int i) {
    sums.at[n][i] = f(sums.at[n][i], row + lane_row() + (i >> 1) * 8, col + 8 * n + lane_col() + (i & 1));
  });
}

// x y^T for 16 rows each, from rows t and j on. Two accumulators halve the chain of dependent products.
template <class X, class Y>
__device__ inline void product_of_rows(Accumulator<2>& sums, const X& x, const Y& y, int t = 0, int j = 0) {
  using T = typename X::Element;
  Accumulator<2> half;
  fill(sums, 0.f);
  fill(half, 0.f);
#pragma unroll 1
  for (int col = 0; col < X::kCols; col += 32) {
    uint32_t a[4];
    load_block(a, x, t, col);
    add_product_transposed<T>(sums, a, y, j, col);
    load_block(a, x, t, col + 16);
    add_product_transposed<T>(half, a, y, j, col + 16);
  }
  add(sums, half);
}

// sums += a b^T, both A fragments.
template <typename T>
__device__ inline void add_product_of_rows(Accumulator<2>& sums, const uint32_t (&a)[4],
                                           const uint32_t (&b)[4]) {
  mma<T>(sums.at[0], a, b[0], b[2]);
  mma<T>(sums.at[1], a, b[1], b[3]);
}

// The diagonal of a 16 x 16 block, for the lane's columns.
__device__ inline void load_diagonal(float2 (&squares)[2], const Accumulator<2>& g) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    // (t, t) of columns t = 8 n + lane_col() + i: the lane of row t % 8 has it.
    const int even = 9 * lane_col() / 2, odd = 9 * lane_col() / 2 + 4;
    squares[n].x = __shfl_sync(~0u, g.at[n][2 * n], even);
    squares[n].y = __shfl_sync(~0u, g.at[n][2 * n + 1], odd);
  }
}

// to_tj = f(x_t.y_j, t, j) for 16 x 16 blocks on and below the diagonal. The block's warps take these
// round-robin, from warp `first` on.
template <typename T, int Warps, class To, class X, class Y, class F>
__device__ inline void compute_score_blocks(const To& to, const X& x, const Y& y, int warp, int first,
                                            const F& f) {
  constexpr int kBlocks = X::kRows / 16;
#pragma unroll 1
  for (int b = (warp - first + Warps) % Warps; b < kBlocks * (kBlocks + 1) / 2; b += Warps) {
    int t = 0, j = b;
    while (j > t) j -= ++t;
    t *= 16, j *= 16;
    Accumulator<2> s;
    product_of_rows(s, x, y, t, j);
    map_elements(s, t, j, f);
    clamp_factor<T>(s);
    uint32_t a[4];
    pack<T>(a, s);
    store_block(to, t, j, a);
  }
}

}  // namespace girih::kernels::lattice

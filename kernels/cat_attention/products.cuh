// Products of a warp: 16 rows, fp32 accumulators. 16-bit elements are multiplied directly, fp32 elements in
// two tf32 parts (tile/tf32.h).
#pragma once

#include <type_traits>

#include "tile/row_store.h"
#include "tile/tf32.h"

namespace girih::kernels {

// A 16 x 16 block of a left factor.
template <typename T>
struct CatAFragment {
  uint32_t at[4];

  template <class Tile>
  __device__ void load(const Tile& tile, int row, int col) {
    load_block(at, tile, row, col);
  }
  // Flips signs; sign: the sign bits of two 16-bit numbers, or 0.
  __device__ void flip_sign(uint32_t sign) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] ^= sign;
  }
};

template <>
struct CatAFragment<float> : SplitAFragment {
  __device__ void flip_sign(uint32_t sign) { SplitAFragment::flip_sign(sign & 0x80000000u); }
};

// sums[m] += a[m] b^T, b = tile[row..row+8N-1, col..col+15]; b is loaded once.
template <typename T, int N, int A, class Tile>
__device__ inline void add_scores(Accumulator<N> (&sums)[A], const CatAFragment<T> (&a)[A], const Tile& tile,
                                  int row, int col) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float4 x =
          *reinterpret_cast<const float4*>(&tile.at(row + 8 * n, col, lane_row(), 2 * lane_col()));
      const float b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int m = 0; m < A; ++m) a[m].multiply(sums[m].at[n], b);
    }
  } else {
    add_products_transposed<T>(sums, reinterpret_cast<const uint32_t(&)[A][4]>(a), tile, row, col);
  }
}
template <typename T, int N, class Tile>
__device__ inline void add_scores(Accumulator<N>& sums, const CatAFragment<T>& a, const Tile& tile, int row,
                                  int col) {
  add_scores<T>(reinterpret_cast<Accumulator<N>(&)[1]>(sums),
                reinterpret_cast<const CatAFragment<T>(&)[1]>(a), tile, row, col);
}

// sums[m] += weights[m] tile[row..row+8M-1, col..col+8N-1], weights rounded to T; the tile is loaded once.
template <typename T, int N, int M, int A, class Tile>
__device__ inline void add_weight_product(Accumulator<N> (&sums)[A], const Accumulator<M> (&weights)[A],
                                          const Tile& tile, int row, int col = 0) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int m = 0; m < A; ++m) {
#pragma unroll
      for (int k = 0; k < M; k += 2) {
        CatAFragment<float> a;
        a.take(weights[m], k);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          float b[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            b[i] = tile.at(row + 8 * (k + i / 2), col + 8 * n, lane_col() + i % 2, lane_row());
          }
          a.multiply(sums[m].at[n], b);
        }
      }
    }
  } else {
    AFragment<M / 2> rounded[A];
#pragma unroll
    for (int m = 0; m < A; ++m) round_to_a_fragment<T>(rounded[m], weights[m]);
#pragma unroll
    for (int k = 0; k < M / 2; ++k) {
      uint32_t a[A][4];
#pragma unroll
      for (int m = 0; m < A; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = rounded[m].at[k][i];
      }
      add_products<T>(sums, a, tile, row + 16 * k, col);
    }
  }
}
template <typename T, int N, int M, class Tile>
__device__ inline void add_weight_product(Accumulator<N>& sums, const Accumulator<M>& weights,
                                          const Tile& tile, int row, int col = 0) {
  add_weight_product<T>(reinterpret_cast<Accumulator<N>(&)[1]>(sums),
                        reinterpret_cast<const Accumulator<M>(&)[1]>(weights), tile, row, col);
}

// Adds the lane's part of the dot products of rows of two tiles: 16 rows, columns col..col+15.
template <class Tile, class Other>
__device__ inline void add_dots(float (&sums)[2], const Tile& x, const Other& y, int row, int col) {
  using T = typename Tile::Element;
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto four = [&](const auto& tile) {
        return *reinterpret_cast<const float4*>(&tile.at(row + 8 * i, col, lane_row(), 2 * lane_col()));
      };
      const float4 a = four(x), b = four(y);
      sums[i] = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sums[i]))));
    }
  } else {
    uint32_t a[4], b[4];
    load_block(a, x, row, col);
    load_block(b, y, row, col);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x_pair = unpack_pair<T>(a[i]), y_pair = unpack_pair<T>(b[i]);
      sums[i & 1] = fmaf(x_pair.x, y_pair.x, fmaf(x_pair.y, y_pair.y, sums[i & 1]));
    }
  }
}

// Stores the sums, rounded, to 16 rows of a tile.
template <int N, class Tile>
__device__ inline void store_accumulator(const Tile& tile, int row, const Accumulator<N>& sums) {
  using T = typename Tile::Element;
  if constexpr (std::is_same_v<T, float>) {
    for_each_register_pair<N>([&](int n, int i) {
      *reinterpret_cast<float2*>(&lane_element(tile, row + 8 * i, 8 * n)) = {sums.at[n][2 * i],
                                                                             sums.at[n][2 * i + 1]};
    });
  } else {
    AFragment<N / 2> rounded;
    round_to_a_fragment<T>(rounded, sums);
    store_blocks(tile, row, 0, rounded);
  }
}

// Stores the warp's part of the rows of a tile to global memory.
template <int Workers, class Tile>
__device__ inline void store_tile(const Tile& tile, typename Tile::Element* to, int64_t stride, int rows,
                                  int cols, int worker) {
  // fp32 rows have the layout of twice as many 16-bit elements
  constexpr int kHalves = sizeof(typename Tile::Element) / 2;
  using Halves = SharedTile<uint16_t, Tile::kRows, kHalves * Tile::kCols>;
  store_rows<Workers>(Halves{reinterpret_cast<uint16_t*>(tile.data)}, reinterpret_cast<uint16_t*>(to),
                      kHalves * stride, rows, kHalves * cols, worker);
}

}  // namespace girih::kernels

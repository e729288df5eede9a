// The products of a warp of the fp32 gradients: sixteen rows of tiles of 64 x 64 fp32 numbers, with the tf32
// products of tile/tf32.h.
//
// Of every sixteen columns a lane has the four neighbours from 4 (lane % 4) on, in operands and in
// accumulators. An accumulator is stored to a tile, and loaded as a left factor, by 16-byte accesses of the
// lane's own elements.
#pragma once

#include "tile/pack.h"
#include "tile/tf32.h"

namespace girih::kernels::delta_product::fp32_gradients {

constexpr int kTile = 64;
constexpr int kBlock = 16;  // rows of a warp; terms that are added together

// The first of the lane's four of sixteen columns.
__device__ inline int lane_four() { return 2 * lane_col(); }

// Recomputes the lane index; otherwise the derived addresses stay live in registers, which the products need.
struct Lane {
  int row, four;

  __device__ Lane() {
    int number = lane();
    ptx::make_opaque(number);
    row = number / 4, four = number % 4 * 4;
  }
};

// A swizzled tile. A warp has no bank conflicts if its lanes read
//     a pack of rows i or 2 i + j, columns 4q..4q+3            (i = 0..7, q = 0..3)
//     columns i, or 2 i and the next, of row 4q + j.
struct SwizzledTile {
  using Element = float;
  static constexpr int kRows = kTile, kCols = kTile, kFloats = kTile * kTile;

  float* data;

  // The swizzle of a row: bits 3 and 4 of the column, from bits 0 to 3 of the row.
  __device__ static int swizzle(int row) {
    return ((row ^ row >> 1 ^ row >> 3) & 1) << 4 | (row >> 2 & 1) << 3;
  }
  __device__ float& at(int row, int col) const { return data[row * kCols + (col ^ swizzle(row))]; }
  // Element (row + lane_row, col + lane_col), sums of numbers without common bits, so that the lane's part is
  // computed once.
  __device__ float& at(int row, int col, int lane_row, int lane_col) const {
    return data[((lane_row * kCols + (lane_col ^ swizzle(lane_row))) ^ col ^ swizzle(row)) + row * kCols];
  }
  __device__ uint32_t address(int row, int col) const { return shared_address(&at(row, col)); }
};

// The lane's four of a tile's sixteen columns from `col`, row `row` + lane_row().
__device__ inline Pack<4> four(const SwizzledTile& tile, int row, int col) {
  return load<4>(&tile.at(row, col, lane_row(), lane_four()));
}
__device__ inline void store_four(const SwizzledTile& tile, int row, int col, const Pack<4>& pack) {
  store<4>(&tile.at(row, col, lane_row(), lane_four()), pack);
}
// Columns 16 m + lane_four() to + 3 of an accumulator, row lane_row() + 8 i.
template <int N>
__device__ inline Pack<4> four(const Accumulator<N>& sums, int i, int m) {
  return {{sums.at[2 * m][2 * i], sums.at[2 * m + 1][2 * i], sums.at[2 * m][2 * i + 1],
           sums.at[2 * m + 1][2 * i + 1]}};
}
template <int N>
__device__ inline void set_four(Accumulator<N>& sums, int i, int m, const Pack<4>& pack) {
#pragma unroll
  for (int e = 0; e < 4; ++e) sums.at[2 * m + e % 2][2 * i + e / 2] = pack.at[e];
}

// sum + x . y
__device__ inline float add_dot(float sum, const Pack<4>& x, const Pack<4>& y) {
#pragma unroll
  for (int e = 0; e < 4; ++e) sum = fmaf(x.at[e], y.at[e], sum);
  return sum;
}

// Rows col..col+15 of the transpose of a tile, columns row..row+15, as a left factor.
__device__ inline void load_transposed(SplitAFragment& a, const SwizzledTile& tile, int row, int col) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto x = [&](int e) { return tile.at(row + e, col + 8 * i, lane.four, lane.row); };
    a.set(i, x(0), x(1), x(2), x(3));
  }
}

// a.multiply() for two groups of eight columns of the sums, n and n + 1.
template <int N>
__device__ inline void multiply_two(Accumulator<N>& sums, int n, const SplitAFragment& a,
                                    const float (&right)[2][4]) {
  a.multiply(reinterpret_cast<float(&)[2][4]>(sums.at[n]), right);
}

// sums += a b^T, b = tile[0..8N-1, col..col+15], for the first `blocks` sixteens of the columns of the sums.
template <int N>
__device__ inline void add_scores(Accumulator<N>& sums, const SplitAFragment& a, const SwizzledTile& tile,
                                  int col, int blocks) {
  const Lane lane;
#pragma unroll
  for (int m = 0; m < N / 2; ++m) {
    if (m >= blocks) break;
    float b[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pack<4> x = load<4>(&tile.at(kBlock * m + half, col, 2 * lane.row, lane.four));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[half][i] = x.at[i];
    }
    multiply_two(sums, 2 * m, a, b);
  }
}

// sums += a b, b = tile[row..row+15, col..col+8N-1], of which `cols` columns exist; in steps of 32 columns,
// which limits the loads in flight to the registers.
template <int N>
__device__ inline void add_product(Accumulator<N>& sums, const SplitAFragment& a, const SwizzledTile& tile,
                                   int row, int col, int cols = 8 * N) {
  const Lane lane;
#pragma unroll
  for (int m = 0; m < N / 2; ++m) {
    if (m % 2 == 0 && kBlock * m >= cols) break;
    float b[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pack<2> x = load<2>(&tile.at(row + i, col + kBlock * m, lane.four, 2 * lane.row));
      b[0][i] = x.at[0], b[1][i] = x.at[1];
    }
    multiply_two(sums, 2 * m, a, b);
  }
}

}  // namespace girih::kernels::delta_product::fp32_gradients

// What a warp of the exact gradients multiplies: sixteen rows of tiles of 64 x 64 fp32 numbers, as tf32.h
// does.
//
// Of every sixteen columns, those of a factor that are added over and those of the sums, a lane has four
// neighbours, 4 (lane % 4) on. So sums go to a tile, and come from it as a left factor, by 16 bytes that are
// the lane's own.
#pragma once

#include "tile/pack.h"
#include "tile/tf32.h"

namespace girih::kernels::delta_product::by_piece {

constexpr int kTile = 64;
constexpr int kBlock = 16;  // rows of a warp, and what goes into a sum at a time

// The lane's first of sixteen columns.
__device__ inline int lane_four() { return 2 * lane_col(); }

// Where the lane is, worked out anew: places in tiles that hang on it would be kept in registers, which the
// products need, for as long as any other place does.
struct Lane {
  int row, four;

  __device__ Lane() {
    int number = lane();
    asm volatile("" : "+r"(number));
    row = number / 4, four = number % 4 * 4;
  }
};

// 16-byte packs change places with the row, so that a warp meets no conflicts where its lanes read
//     a pack of rows i or 2 i + j, columns 4q..4q+3            (i = 0..7, q = 0..3)
//     columns i, or 2 i and the next, of row 4q + j.
struct PieceTile {
  using Element = float;
  static constexpr int kRows = kTile, kCols = kTile, kFloats = kTile * kTile;

  float* data;

  // What changes of a column: bits 3 and 4, by bits 0 to 3 of the row.
  __device__ static int turn(int row) { return ((row ^ row >> 1 ^ row >> 3) & 1) << 4 | (row >> 2 & 1) << 3; }
  __device__ float& at(int row, int col) const { return data[row * kCols + (col ^ turn(row))]; }
  // Of (row + lane_row, col + lane_col), numbers without common bits: the lanes' part is worked out once.
  __device__ float& at(int row, int col, int lane_row, int lane_col) const {
    return data[((lane_row * kCols + (lane_col ^ turn(lane_row))) ^ col ^ turn(row)) + row * kCols];
  }
  __device__ uint32_t address(int row, int col) const { return shared_address(&at(row, col)); }
};

// The lane's four of a tile's sixteen columns from `col`, row lane_row() of eight.
__device__ inline Pack<4> four(const PieceTile& tile, int row, int col) {
  return load<4>(&tile.at(row, col, lane_row(), lane_four()));
}
__device__ inline void put(const PieceTile& tile, int row, int col, const Pack<4>& pack) {
  store<4>(&tile.at(row, col, lane_row(), lane_four()), pack);
}
// Of sums columns 16m + lane_four() to the third after it, row lane_row() + 8i.
template <int N>
__device__ inline Pack<4> four(const Sums<N>& sums, int i, int m) {
  return {{sums.at[2 * m][2 * i], sums.at[2 * m + 1][2 * i], sums.at[2 * m][2 * i + 1],
           sums.at[2 * m + 1][2 * i + 1]}};
}
template <int N>
__device__ inline void set_four(Sums<N>& sums, int i, int m, const Pack<4>& pack) {
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
__device__ inline void load_transposed(SplitBlock& a, const PieceTile& tile, int row, int col) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto x = [&](int e) { return tile.at(row + e, col + 8 * i, lane.four, lane.row); };
    a.set(i, x(0), x(1), x(2), x(3));
  }
}

// a.multiply() of eight columns of the sums and the next.
template <int N>
__device__ inline void multiply_two(Sums<N>& sums, int n, const SplitBlock& a, const float (&right)[2][4]) {
  a.multiply(reinterpret_cast<float(&)[2][4]>(sums.at[n]), right);
}

// sums += a b^T, b = tile[0..8N-1, col..col+15], of the columns of the sums the first `blocks` sixteens.
template <int N>
__device__ inline void add_scores(Sums<N>& sums, const SplitBlock& a, const PieceTile& tile, int col,
                                  int blocks) {
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

// sums += a b, b = tile[row..row+15, col..col+8N-1], of which the first `cols` columns are there: 32 by 32,
// so that no more is under way at a time than there are registers for.
template <int N>
__device__ inline void add_product(Sums<N>& sums, const SplitBlock& a, const PieceTile& tile, int row,
                                   int col, int cols = 8 * N) {
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

}  // namespace girih::kernels::delta_product::by_piece

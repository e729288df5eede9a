// The scores of the rows of a chunk with each other; a warp has 16 rows against all 64. In registers, as the
// left factor of products, and by blocks of 16 columns.
#pragma once

#include "gsa/gsa.h"
#include "tile/gates.h"
#include "tile/shared.h"

namespace girih::kernels {

// The scores of a warp's 16 rows against the 64 rows of the chunk, in two halves of 32 columns. One half of
// two of the warps is fully masked; these warps skip this half.
struct Scores {
  Sums<4> half[2];
};

__device__ inline void zero(Scores& a) {
  fill(a.half[0], 0.f);
  fill(a.half[1], 0.f);
}

// Which scores are not masked: those of earlier columns (and the row's own), or of later columns.
enum class Side { earlier, later };

template <Side side>
__device__ inline bool has_half(int h, int warp) {
  return side == Side::earlier ? h == 0 || warp >= 2 : h == 1 || warp < 2;
}

// a += x y^T, columns col..col+15 of both. Fully masked halves are skipped.
template <Side side, typename T, class Tile>
__device__ inline void add_scores(Scores& a, const uint32_t (&x)[4], const Tile& y, int col, int warp) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (has_half<side>(h, warp)) add_product_transposed<T>(a.half[h], x, y, 32 * h, col);
  }
}

// Rounds the scores, and sets them to zero on the masked side of the diagonal and, without `Diagonal`, on the
// diagonal. Fully masked halves are not written.
template <Side side, bool Diagonal, typename T>
__device__ inline void round_scores(Operand<2> (&to)[2], const Scores& a, int warp) {
  // In the half with the diagonal, one of the two blocks of 16 columns has the diagonal. The code has no
  // branches: with branches the compiler kept `to` in local memory.
  const bool second = warp & 1;
  uint32_t stay[2][4];
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int row = lane_row() + (x & 1) * 8, col = lane_col() + (x >> 1) * 8;
    const auto stays = [&](int c) {
      return (side == Side::earlier ? c < row : c > row) || (Diagonal && c == row);
    };
    const uint32_t diagonal = (stays(col) ? 0xffffu : 0u) | (stays(col + 1) ? 0xffff0000u : 0u);
    stay[0][x] = second ? (side == Side::earlier ? ~0u : 0u) : diagonal;
    stay[1][x] = second ? diagonal : (side == Side::earlier ? 0u : ~0u);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!has_half<side>(h, warp)) continue;
    round_to<T>(to[h], a.half[h]);
    const uint32_t whole = h == warp >> 1 ? 0u : ~0u;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      to[h].at[0][x] &= stay[0][x] | whole;
      to[h].at[1][x] &= stay[1][x] | whole;
    }
  }
}

// sums += a y, columns col.. of y
template <Side side, typename T, int N, class Tile>
__device__ inline void add_scored(Sums<N>& sums, const Operand<2> (&a)[2], const Tile& y, int warp,
                                  int col = 0) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (has_half<side>(h, warp)) add_product<T>(sums, a[h], y, 32 * h, col);
  }
}

// Calls f(score, n, i) for the 16 columns of block `block` of the scores; [n][i] is the index in a Sums<2>.
template <class A, class F>
__device__ inline void for_each_of_block(A& a, int block, const F& f) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b != block) continue;
    each_sum<2>([&](int n, int i) { f(a.half[b >> 1].at[2 * (b & 1) + n][i], n, i); });
  }
}
__device__ inline void block_of(Sums<2>& to, const Scores& a, int block) {
  for_each_of_block(a, block, [&](float x, int n, int i) { to.at[n][i] = x; });
}
__device__ inline void set_block(Scores& a, const Sums<2>& from, int block) {
  for_each_of_block(a, block, [&](float& x, int n, int i) { x = from.at[n][i]; });
}

// Writes the scores of rows with themselves to `to` [64].
__device__ inline void put_diagonal(float* to, const Scores& a, int warp) {
  Sums<2> own;
  block_of(own, a, warp);
  each_sum<2>([&](int n, int i) {
    const int row = lane_row() + 8 * (i >> 1);
    if (8 * n + lane_col() + (i & 1) == row) to[kRows * warp + row] = own.at[n][i];
  });
}

// A 16 x 16 buffer of a warp in shared memory.
struct Scratch {
  float* at;

  __device__ void put(const Sums<2>& block) const {
    each_sum<2>([&](int n, int i) {
      at[(lane_row() + 8 * (i >> 1)) * kRows + 8 * n + lane_col() + (i & 1)] = block.at[n][i];
    });
    __syncwarp();
  }
  __device__ void get(Sums<2>& block) const {
    __syncwarp();
    each_sum<2>([&](int n, int i) {
      block.at[n][i] = at[(lane_row() + 8 * (i >> 1)) * kRows + 8 * n + lane_col() + (i & 1)];
    });
    __syncwarp();
  }
  // Column j of rows lane_row() and lane_row() + 8.
  __device__ float2 column(int j) const {
    return {at[lane_row() * kRows + j], at[(lane_row() + 8) * kRows + j]};
  }
  // Writes column j; each value is summed over the four lanes of a row.
  __device__ void put_column(int j, float above, float below) const {
    above = sum_over_row(above);
    below = sum_over_row(below);
    if (lane_col() == 0) {
      at[lane_row() * kRows + j] = above;
      at[(lane_row() + 8) * kRows + j] = below;
    }
  }
};

}  // namespace girih::kernels

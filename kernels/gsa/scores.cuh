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
  Accumulator<4> half[2];
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
__device__ inline void round_scores(AFragment<2> (&to)[2], const Scores& a, int warp) {
  // In the half with the diagonal, one of the two blocks of 16 columns has the diagonal. The code has no
  // branches: with branches the compiler kept `to` in local memory.
  const bool is_second_block = warp & 1;
  uint32_t mask[2][4];
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int row = lane_row() + (x & 1) * 8, col = lane_col() + (x >> 1) * 8;
    const auto is_unmasked = [&](int c) {
      return (side == Side::earlier ? c < row : c > row) || (Diagonal && c == row);
    };
    const uint32_t diagonal = (is_unmasked(col) ? 0xffffu : 0u) | (is_unmasked(col + 1) ? 0xffff0000u : 0u);
    mask[0][x] = is_second_block ? (side == Side::earlier ? ~0u : 0u) : diagonal;
    mask[1][x] = is_second_block ? diagonal : (side == Side::earlier ? 0u : ~0u);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!has_half<side>(h, warp)) continue;
    round_to_a_fragment<T>(to[h], a.half[h]);
    const uint32_t off_diagonal_mask = h == warp >> 1 ? 0u : ~0u;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      to[h].at[0][x] &= mask[0][x] | off_diagonal_mask;
      to[h].at[1][x] &= mask[1][x] | off_diagonal_mask;
    }
  }
}

// sums += a y, columns col.. of y
template <Side side, typename T, int N, class Tile>
__device__ inline void add_score_product(Accumulator<N>& sums, const AFragment<2> (&a)[2], const Tile& y,
                                         int warp, int col = 0) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (has_half<side>(h, warp)) add_product<T>(sums, a[h], y, 32 * h, col);
  }
}

// Calls f(score, n, i) for the 16 columns of block `block` of the scores; [n][i] is the index in an
// Accumulator<2>.
template <class A, class F>
__device__ inline void for_each_in_block(A& a, int block, const F& f) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b != block) continue;
    for_each_register<2>([&](int n, int i) { f(a.half[b >> 1].at[2 * (b & 1) + n][i], n, i); });
  }
}
__device__ inline void get_block(Accumulator<2>& to, const Scores& a, int block) {
  for_each_in_block(a, block, [&](float x, int n, int i) { to.at[n][i] = x; });
}
__device__ inline void set_block(Scores& a, const Accumulator<2>& from, int block) {
  for_each_in_block(a, block, [&](float& x, int n, int i) { x = from.at[n][i]; });
}

// Writes the scores of rows with themselves to `to` [64].
__device__ inline void store_diagonal(float* to, const Scores& a, int warp) {
  Accumulator<2> own;
  get_block(own, a, warp);
  for_each_register<2>([&](int n, int i) {
    const int row = lane_row() + 8 * (i >> 1);
    if (8 * n + lane_col() + (i & 1) == row) to[kWarpRows * warp + row] = own.at[n][i];
  });
}

// A 16 x 16 buffer of a warp in shared memory.
struct Scratch {
  float* data;

  __device__ void store(const Accumulator<2>& block) const {
    for_each_register<2>([&](int n, int i) {
      data[(lane_row() + 8 * (i >> 1)) * kWarpRows + 8 * n + lane_col() + (i & 1)] = block.at[n][i];
    });
    __syncwarp();
  }
  __device__ void load(Accumulator<2>& block) const {
    __syncwarp();
    for_each_register<2>([&](int n, int i) {
      block.at[n][i] = data[(lane_row() + 8 * (i >> 1)) * kWarpRows + 8 * n + lane_col() + (i & 1)];
    });
    __syncwarp();
  }
  // Column j of rows lane_row() and lane_row() + 8.
  __device__ float2 column(int j) const {
    return {data[lane_row() * kWarpRows + j], data[(lane_row() + 8) * kWarpRows + j]};
  }
  // Writes column j; each value is summed over the four lanes of a row.
  __device__ void store_column(int j, float upper_sum, float lower_sum) const {
    upper_sum = sum_over_row(upper_sum);
    lower_sum = sum_over_row(lower_sum);
    if (lane_col() == 0) {
      data[lane_row() * kWarpRows + j] = upper_sum;
      data[(lane_row() + 8) * kWarpRows + j] = lower_sum;
    }
  }
};

}  // namespace girih::kernels

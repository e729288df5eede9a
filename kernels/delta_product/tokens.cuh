// Rows of a chunk's tokens: as many as it has steps, or of several steps a token half a tile; and what tokens
// have to do with steps.
#pragma once

#include "delta_product/prepared.cuh"
#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

// More tokens than half a tile has rows.
__host__ __device__ constexpr bool has_many(int tokens) { return tokens > kDeltaRows / 2; }
// Rows of a tile that has them.
__host__ __device__ constexpr int token_rows(bool many_tokens) {
  return many_tokens ? kDeltaRows : kDeltaRows / 2;
}

// P^T out of k_j . q_t, a warp's rows: of every token scale rho_t, and L_t.
template <int N>
__device__ inline void weigh_transposed(Sums<N>& scores, const Vectors& vectors, int n, int warp,
                                        const float2* tokens) {
  const int row = kTileRows * warp + lane_row();
  const float2 before = vectors.rows(kDeltaLog, row), unit = vectors.rows(kDeltaUnit, row);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float4 two = *reinterpret_cast<const float4*>(tokens + 8 * i + lane_col());
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = 8 * i + lane_col() + j % 2, of = row + j / 2 * 8;
      const float factor = j % 2 == 0 ? two.x : two.z, log = j % 2 == 0 ? two.y : two.w;
      const float weight =
          factor * (j < 2 ? unit.x : unit.y) * exp2_fast(log - (j < 2 ? before.x : before.y));
      float& x = scores.at[i][j];
      x = of < (token + 1) * n ? x * weight : 0.f;
    }
  }
}

// P^T out of k_j . q_t where its factors are those of its tokens alone, `factors(i)` the lane's two of eight.
template <int N, class Factors>
__device__ inline void scale_transposed(Sums<N>& scores, int n, int warp, const Factors& factors) {
  const int row = kTileRows * warp + lane_row() - (lane_col() + 1) * n;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float2 by = factors(i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& x = scores.at[i][j];
      x = row + j / 2 * 8 < (8 * i + j % 2) * n ? x * (j % 2 == 0 ? by.x : by.y) : 0.f;
    }
  }
}

template <int N>
__device__ inline void scale_transposed(Sums<N>& scores, int n, int warp, float factor) {
  scale_transposed(scores, n, warp, [&](int) { return float2{factor, factor}; });
}

// |q_t|^2 of eight tokens from `row` on, the lane's token `row` + lane_row().
template <typename T, int D, int Rows>
__device__ inline float square_of_rows(const BlockTile<T, D, Rows>& q, int row) {
  float sum = 0.f;
#pragma unroll
  for (int col = 0; col < D; col += 32) {
    uint32_t four[4];
    load_matrices(four, q.address(row, col, lane() & 7, (lane() >> 3) * 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpaired<T>(four[i]);
      sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
    }
  }
  return sum_over_row(sum);
}

// put(token, scale rho_t, L_t) of all tokens in a tile of q, each by a lane of one of four warps. A query
// that is zero has rho 1.
template <typename T, int D, int Rows, class Put>
__device__ inline void for_each_token(const BlockTile<T, D, Rows>& q, const DeltaShape& shape,
                                      const Vectors& vectors, int warp, const Put& put) {
  const auto log_of = [&](int token) {
    return vectors.element(kDeltaLog, min(token * shape.n, kDeltaRows - 1));
  };
  if (!shape.unit) {
    const int token = 32 * warp + lane();
    if (token < Rows) put(token, shape.scale, log_of(token));
    return;
  }
#pragma unroll
  for (int first = 0; first < Rows; first += 32) {
    const int eight = first + 8 * warp, token = eight + lane_row();
    const float square = square_of_rows<T>(q, eight);
    const float factor = shape.scale * (square > 0.f ? rsqrtf(square + 1e-6f) : 1.f);
    if (lane_col() == 0) put(token, factor, log_of(token));
  }
}

}  // namespace girih::kernels::delta_product

// Tiles of tokens: 64 rows if n = 1, else 32 rows; and the factors of scores between tokens and steps.
#pragma once

#include "delta_product/prepared.cuh"
#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

// A chunk can have more than 32 tokens.
__host__ __device__ constexpr bool has_many(int tokens) { return tokens > kDeltaRows / 2; }
// Rows of a tile of tokens.
__host__ __device__ constexpr int token_rows(bool many_tokens) {
  return many_tokens ? kDeltaRows : kDeltaRows / 2;
}

// P^T from scores k_j . q_t, for the 16 rows j of a warp. tokens[t] = {scale rho_t, L_t}.
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

// P^T from scores k_j . q_t if its factors depend on the token only. factors(i) returns the factors of the
// lane's two tokens among tokens 8 i to 8 i + 7.
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

// q_t|^2 of the lane's token, `row` + lane_row().
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

// Calls put(token, scale rho_t, L_t) for all tokens of a tile of q; four warps share the tokens. rho_t is 1
// if q_t is zero.
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

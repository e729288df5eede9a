// Tiles of tokens: 64 rows if n = 1, else 32 rows; and the factors of the scores P of tokens t with rows j.
#pragma once

#include "delta_product/prepared.cuh"
#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

// Whether a chunk can have more than 32 tokens.
__host__ __device__ constexpr bool has_many_tokens(int tokens) { return tokens > kDeltaChunkRows / 2; }
// Rows of a tile of tokens.
__host__ __device__ constexpr int token_rows(bool many_tokens) {
  return many_tokens ? kDeltaChunkRows : kDeltaChunkRows / 2;
}

// P^T from scores k_j . q_t, for the 16 rows j of a warp: multiplies by the factors, and clears the rows that
// belong to tokens after t. token_factors[t] = {scale rho_t, L_t log2(e)}.
template <int N>
__device__ inline void apply_score_factors_transposed(Accumulator<N>& scores,
                                                      const ChunkFactors& chunk_factors, int n, int warp,
                                                      const float2* token_factors) {
  const int row = kTileRows * warp + lane_row();
  const float2 row_log = chunk_factors.rows(kDeltaLogDecay, row), rho = chunk_factors.rows(kDeltaRho, row);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float4 two = *reinterpret_cast<const float4*>(token_factors + 8 * i + lane_col());
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = 8 * i + lane_col() + j % 2, step = row + j / 2 * 8;
      const float factor = j % 2 == 0 ? two.x : two.z, log = j % 2 == 0 ? two.y : two.w;
      const float weight =
          factor * (j < 2 ? rho.x : rho.y) * exp2_fast(log - (j < 2 ? row_log.x : row_log.y));
      float& x = scores.at[i][j];
      x = step < (token + 1) * n ? x * weight : 0.f;
    }
  }
}

// As apply_score_factors_transposed() if the factors depend on the token only. factors(i) returns the factors
// of the lane's two tokens among tokens 8 i to 8 i + 7.
template <int N, class Factors>
__device__ inline void scale_scores_transposed(Accumulator<N>& scores, int n, int warp,
                                               const Factors& factors) {
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
__device__ inline void scale_scores_transposed(Accumulator<N>& scores, int n, int warp, float factor) {
  scale_scores_transposed(scores, n, warp, [&](int) { return float2{factor, factor}; });
}

// |q_t|^2 of the lane's token, t = `row` + lane_row().
template <typename T, int D, int Rows>
__device__ inline float square_of_rows(const BlockTile<T, D, Rows>& q, int row) {
  float sum = 0.f;
#pragma unroll
  for (int col = 0; col < D; col += 32) {
    uint32_t four[4];
    ldmatrix(four, q.address(row, col, lane() & 7, (lane() >> 3) * 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair<T>(four[i]);
      sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
    }
  }
  return sum_over_row(sum);
}

// Calls store(token, scale rho_t, L_t log2(e)) for all tokens of a tile of q; four warps share the tokens.
// rho_t is 1 if q_t is zero.
template <typename T, int D, int Rows, class Store>
__device__ inline void compute_token_factors(const BlockTile<T, D, Rows>& q, const DeltaShape& shape,
                                             const ChunkFactors& chunk_factors, int warp,
                                             const Store& store) {
  const auto log_of = [&](int token) {
    return chunk_factors.element(kDeltaLogDecay, min(token * shape.n, kDeltaChunkRows - 1));
  };
  if (!shape.unit) {
    const int token = 32 * warp + lane();
    if (token < Rows) store(token, shape.scale, log_of(token));
    return;
  }
#pragma unroll
  for (int first = 0; first < Rows; first += 32) {
    const int first_token = first + 8 * warp, token = first_token + lane_row();
    const float square = square_of_rows<T>(q, first_token);
    const float factor = shape.scale * (square > 0.f ? rsqrtf(square + 1e-6f) : 1.f);
    if (lane_col() == 0) store(token, factor, log_of(token));
  }
}

}  // namespace girih::kernels::delta_product

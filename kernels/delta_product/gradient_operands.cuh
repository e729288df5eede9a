// The factors of N and dP, and the sums with M and P.
#pragma once

#include "delta_product/gradient_rows.cuh"

namespace girih::kernels::delta_product {

// products *= e^{L_i - L_j} for the blocks of 16 columns j with has(block); `log` is L_i. All blocks are
// multiplied before the next product starts, which leaves no registers for this.
template <class Has>
__device__ inline void decay(Accumulator<8>& products, ChunkFactors chunk_factors, float2 log,
                             const Has& has) {
#pragma unroll
  for (int block = 0; block < kChunkTiles; ++block) {
    if (!has(block)) continue;
#pragma unroll
    for (int i = 2 * block; i < 2 * block + 2; ++i) {
      const float2 log_j = chunk_factors.pair(kDeltaLogDecay, 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        products.at[i][j] *= exp2_fast((j < 2 ? log.x : log.y) - (j % 2 == 0 ? log_j.x : log_j.y));
      }
    }
  }
  pin_registers(products);
}

// Sums over 16 rows, for 32 columns from `col` on.
__device__ inline void store_column_sums(float (&to)[kDeltaChunkRows], int col, float (&x)[8]) {
  to[col + lane_row() / 2 * 8 + lane_col() + lane_row() % 2] = sums_over_col(x);
}

// Rounds eight of the 16 columns of an A fragment.
template <typename T>
__device__ inline void round_half(uint32_t (&to)[4], int half, const float (&x)[4]) {
  to[2 * half] = pack_pair<T>(x[0], x[1]);
  to[2 * half + 1] = pack_pair<T>(x[2], x[3]);
}
// Adds the lane's 2 x 2 elements to the sums of its rows, and to the sums of its columns with the factors of
// the rows.
__device__ inline void add_pair_sums(float2& row_sums, float* cols, const float (&pair_terms)[4], float2 by) {
  row_sums.x += pair_terms[0] + pair_terms[1], row_sums.y += pair_terms[2] + pair_terms[3];
#pragma unroll
  for (int j = 0; j < 2; ++j) cols[j] = fmaf(pair_terms[j], by.x, pair_terms[j + 2] * by.y);
}

// From G U^T: computes N with its factors, once with rho of the row and once with rho of the column
// (GradientTiles::kStepCols and kStepRows), and the sums of N M. The blocks right of the diagonal are neither
// stored nor read. If one warpgroup has all of N, `left` becomes N with rho of the column. Without factors
// both are equal, and only `step_cols` is stored.
template <Factors factors, typename T, int D, bool OneSlab>
__device__ inline void compute_step_operands(const DeltaGradients& p, const WarpCoord& coord,
                                             const GradientTiles<T, D, OneSlab>& tile,
                                             ChunkFactors chunk_factors, const Divider& steps,
                                             Accumulator<8>& products, AFragment<kChunkTiles>& left) {
  using Tiles = GradientTiles<T, D, OneSlab>;
  constexpr bool kHasNoFactors = factors == Factors::none;
  const bool gated = factors == Factors::any && p.gated;
  if (Tiles::kHasNInRegisters) fill(left);
  const OperandBlocks step_rows = tile.blocks(Tiles::kStepRows), step_cols = tile.blocks(Tiles::kStepCols);
  const int thread_row = coord.thread_row;
  const auto first_of = [&](int row) { return static_cast<int>(steps.divide(row) * steps.by); };
  const int token_row = first_of(thread_row),
            token_row_below = first_of(thread_row + 8);  // first row of the same token
  const auto factor_rows = [&](int kind) { return chunk_factors.rows(kind, thread_row); };
  if (gated)
    decay(products, chunk_factors, factor_rows(kDeltaLogDecay),
          [&](int block) { return block <= coord.band; });
  const float2 rho = kHasNoFactors ? make_float2(1.f, 1.f) : factor_rows(kDeltaRho),
               beta = !tile.chunk_info->is_first_head              ? make_float2(0.f, 0.f)
                      : dz_holds_dv<T>(p, Prepared{tile.prepared}) ? make_float2(1.f, 1.f)
                                                                   : factor_rows(kDeltaBeta),
               minus_beta_rho = {-beta.x * rho.x, -beta.y * rho.y};
  float2 beta_sums = {0.f, 0.f}, row_sums = {0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // K K^T
    Accumulator<4> m;
    fill(m, 0.f);
    add_scores<T>(tile.origin, m, tile.k, tile.k, 32 * half);
    if (2 * half > coord.band) continue;
    float cols[8];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int col = 32 * half + 16 * block;
      if (col > coord.row) {
#pragma unroll
        for (int i = 0; i < 4; ++i) cols[4 * block + i] = 0.f;
        continue;
      }
      uint32_t row_rho_n[4], separate_block[4];
      uint32_t(&col_rho_n)[4] = Tiles::kHasNInRegisters ? left.at[col / kTileRows] : separate_block;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 rho_j =
            kHasNoFactors ? make_float2(1.f, 1.f) : chunk_factors.pair(kDeltaRho, col + 8 * i);
        float pair_terms[4], col_rho_terms[4], row_rho_terms[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int r = thread_row + j / 2 * 8, c = col + 8 * i + lane_col() + j % 2;
          const float x = c < r ? products.at[col / 8 + i][j] : 0.f,
                      with_rho = x * (j % 2 == 0 ? rho_j.x : rho_j.y),
                      with_m = with_rho * m.at[2 * block + i][j];
          (j < 2 ? beta_sums.x : beta_sums.y) += with_m;
          pair_terms[j] = c < (j < 2 ? token_row : token_row_below) ? with_m : 0.f;
          // fmaf(..., 0) makes zeros positive, because the two halves of a diagonal block are combined by a
          // bitwise or.
          col_rho_terms[j] = fmaf(with_rho, j < 2 ? -beta.x : -beta.y, 0.f);
          row_rho_terms[j] = fmaf(x, j < 2 ? minus_beta_rho.x : minus_beta_rho.y, 0.f);
        }
        round_half<T>(col_rho_n, i, col_rho_terms);
        if (!kHasNoFactors) round_half<T>(row_rho_n, i, row_rho_terms);
        if (gated) add_pair_sums(row_sums, cols + 4 * block + 2 * i, pair_terms, minus_beta_rho);
      }
      if (!Tiles::kHasNInRegisters && !kHasNoFactors)
        step_rows.store(inverse_block_index(coord.band, 2 * half + block), col_rho_n);
      step_cols.store(inverse_block_index(coord.band, 2 * half + block),
                      kHasNoFactors ? col_rho_n : row_rho_n);
    }
    if (gated) store_column_sums(tile.finish_sums->row_cols[coord.band], 32 * half, cols);
  }
  beta_sums = sum_over_rows(beta_sums);
  store_warp_rows(tile.sums->beta[GradientSizes<D>::kValueGroups], thread_row,
                  {-rho.x * beta_sums.x, -rho.y * beta_sums.y});
  if (gated) {
    row_sums = sum_over_rows(row_sums);
    store_warp_rows(tile.finish_sums->row, thread_row,
                    {minus_beta_rho.x * row_sums.x, minus_beta_rho.y * row_sums.y});
  }
}

// From do U^T: computes dP with its factors, once with the factor of the token for dk and once with rho of
// the row for dq (GradientTiles::kTokenBlocks and kRowBlocks), and the sums of P dP. The blocks whose rows
// are all after the tokens are neither stored nor read. If the only factor is the scale, one block serves
// both.
template <Factors factors, typename T, int D, bool OneSlab>
__device__ inline void compute_query_operands(const DeltaGradients& p, const WarpCoord& coord,
                                              const GradientTiles<T, D, OneSlab>& tile,
                                              ChunkFactors chunk_factors, Accumulator<8>& products) {
  using Tiles = GradientTiles<T, D, OneSlab>;
  const OperandBlocks token_blocks = tile.blocks(Tiles::kTokenBlocks),
                      row_blocks = tile.blocks(Tiles::kRowBlocks);
  const int n = p.shape.n, token = coord.thread_row;
  const bool many_tokens = tile.chunk_info->many_tokens;
  const int first = token * n, first_below = (token + 8) * n;  // first rows of the tokens
  constexpr bool kHasNoFactors = factors == Factors::none, kHasScaledDp = kCanScaleDp<T, factors>;
  const bool gated = factors == Factors::any && p.gated;
  const float2 factor = kHasNoFactors ? make_float2(p.shape.scale, p.shape.scale)
                                      : make_float2(tile.factors[token], tile.factors[token + 8]);
  const bool has_tokens = coord.band < tile.chunk_info->bands();
  if (gated) {
    const float2 log = {chunk_factors.element(kDeltaLogDecay, min(first, kDeltaChunkRows - 1)),
                        chunk_factors.element(kDeltaLogDecay, min(first_below, kDeltaChunkRows - 1))};
    decay(products, chunk_factors, log,
          [&](int block) { return ChunkInfo::has_reads(coord.band, block, n); });
  }
  float2 token_sums = {0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Q K^T
    Accumulator<4> scores;
    fill(scores, 0.f);
    if (gated) add_scores<T>(tile.origin, scores, tile.q, tile.k, 32 * half);
    if (!has_tokens || !ChunkInfo::has_reads(coord.band, 2 * half, n)) continue;
    float cols[8];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int col = 32 * half + 16 * block;
      if (!ChunkInfo::has_reads(coord.band, col / kTileRows, n)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) cols[4 * block + i] = 0.f;
        continue;
      }
      uint32_t token_factor_dp[4], row_rho_dp[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 rho_j =
            kHasNoFactors ? make_float2(1.f, 1.f) : chunk_factors.pair(kDeltaRho, col + 8 * i);
        float pair_terms[4], token_factor_terms[4], row_rho_terms[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int start = j < 2 ? first : first_below, r = col + 8 * i + lane_col() + j % 2;
          const float x = r < start + n ? products.at[col / 8 + i][j] : 0.f;
          token_factor_terms[j] = (j < 2 ? factor.x : factor.y) * x;
          row_rho_terms[j] = (j % 2 == 0 ? rho_j.x : rho_j.y) * x;
          pair_terms[j] = r < start ? scores.at[2 * block + i][j] * row_rho_terms[j] : 0.f;
        }
        round_half<T>(token_factor_dp, i, token_factor_terms);
        if (!kHasScaledDp) round_half<T>(row_rho_dp, i, row_rho_terms);
        if (gated) add_pair_sums(token_sums, cols + 4 * block + 2 * i, pair_terms, factor);
      }
      const int at = OperandBlocks::token_block_index(many_tokens, coord.band, 2 * half + block);
      token_blocks.store(at, token_factor_dp);
      if (!kHasScaledDp) row_blocks.store(at, row_rho_dp);
    }
    if (gated) store_column_sums(tile.finish_sums->token_cols[coord.band], 32 * half, cols);
  }
  if (gated && has_tokens) {
    token_sums = sum_over_rows(token_sums);
    store_warp_rows(tile.finish_sums->token, token, {factor.x * token_sums.x, factor.y * token_sums.y});
  }
}

}  // namespace girih::kernels::delta_product

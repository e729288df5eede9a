// The factors of N and dP, and the sums with M and P.
#pragma once

#include "delta_product/gradient_rows.cuh"

namespace girih::kernels::delta_product {

// products *= e^{L_i - L_j}, 16 columns j at a time, where has(block); `log` is L_i. All at once before the
// next product starts, which leaves no registers for it.
template <class Has>
__device__ inline void decay(Sums<8>& products, Vectors vectors, float2 log, const Has& has) {
#pragma unroll
  for (int block = 0; block < kTilesDown; ++block) {
    if (!has(block)) continue;
#pragma unroll
    for (int i = 2 * block; i < 2 * block + 2; ++i) {
      const float2 log_j = vectors.pair(kDeltaLog, 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        products.at[i][j] *= exp2_fast((j < 2 ? log.x : log.y) - (j % 2 == 0 ? log_j.x : log_j.y));
      }
    }
  }
  pin(products);
}

// Sums over 16 rows, for 32 columns from `col` on.
__device__ inline void put_columns(float (&to)[kDeltaRows], int col, float (&x)[8]) {
  to[col + lane_row() / 2 * 8 + lane_col() + lane_row() % 2] = sums_over_col(x);
}

// Rounds eight of the 16 columns of an A fragment.
template <typename T>
__device__ inline void put_half(uint32_t (&to)[4], int half, const float (&x)[4]) {
  to[2 * half] = pair_of<T>(x[0], x[1]);
  to[2 * half + 1] = pair_of<T>(x[2], x[3]);
}
// Adds the lane's 2 x 2 elements to the sums of its rows, and to the sums of its columns with the factors of
// the rows.
__device__ inline void add_kept(float2& of_rows, float* cols, const float (&kept)[4], float2 by) {
  of_rows.x += kept[0] + kept[1], of_rows.y += kept[2] + kept[3];
#pragma unroll
  for (int j = 0; j < 2; ++j) cols[j] = fmaf(kept[j], by.x, kept[j + 2] * by.y);
}

// From G U^T: N with its factors, once with rho of the row and once with rho of the column, and the sums with
// M. The blocks right of the diagonal are neither stored nor read. `left` gets N with rho of the column if
// one warpgroup has all of it. Without factors `step_cols` holds what `step_rows` would.
template <Factors factors, typename T, int D, bool OneSlab>
__device__ inline void weigh_steps(const DeltaGradients& p, const WarpPlace& place,
                                   const GradientTiles<T, D, OneSlab>& tile, Vectors vectors,
                                   const Divider& steps, Sums<8>& products, Operand<kTilesDown>& left) {
  using Tiles = GradientTiles<T, D, OneSlab>;
  constexpr bool kDirect = factors == Factors::none;
  const bool gated = factors == Factors::any && p.gated;
  if (Tiles::kOwn) fill(left);
  const Blocks step_rows = tile.blocks(Tiles::kStepRows), step_cols = tile.blocks(Tiles::kStepCols);
  const int mine = place.mine;
  const auto first_of = [&](int row) { return static_cast<int>(steps.divide(row) * steps.by); };
  const int own = first_of(mine), own_below = first_of(mine + 8);  // first row of the same token
  const auto of_rows = [&](int vector) { return vectors.rows(vector, mine); };
  if (gated) decay(products, vectors, of_rows(kDeltaLog), [&](int block) { return block <= place.band; });
  const float2 unit = kDirect ? make_float2(1.f, 1.f) : of_rows(kDeltaUnit),
               beta = !tile.here->first                        ? make_float2(0.f, 0.f)
                      : divides<T>(p, Prepared{tile.prepared}) ? make_float2(1.f, 1.f)
                                                               : of_rows(kDeltaBeta),
               of_unit = {-beta.x * unit.x, -beta.y * unit.y};
  float2 of_beta = {0.f, 0.f}, of_row = {0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // K K^T
    Sums<4> m;
    fill(m, 0.f);
    add_scores<T>(tile.origin, m, tile.k, tile.k, 32 * half);
    if (2 * half > place.band) continue;
    float cols[8];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int col = 32 * half + 16 * block;
      if (col > place.row) {
#pragma unroll
        for (int i = 0; i < 4; ++i) cols[4 * block + i] = 0.f;
        continue;
      }
      uint32_t with_row[4], apart[4];
      uint32_t(&with_col)[4] = Tiles::kOwn ? left.at[col / kTileRows] : apart;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 unit_j = kDirect ? make_float2(1.f, 1.f) : vectors.pair(kDeltaUnit, col + 8 * i);
        float kept[4], of_col[4], of_own[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int r = mine + j / 2 * 8, c = col + 8 * i + lane_col() + j % 2;
          const float x = c < r ? products.at[col / 8 + i][j] : 0.f,
                      with_rho = x * (j % 2 == 0 ? unit_j.x : unit_j.y),
                      with_m = with_rho * m.at[2 * block + i][j];
          (j < 2 ? of_beta.x : of_beta.y) += with_m;
          kept[j] = c < (j < 2 ? own : own_below) ? with_m : 0.f;
          // fmaf(..., 0) makes zeros positive, because the two halves of a diagonal block are combined by a
          // bitwise or.
          of_col[j] = fmaf(with_rho, j < 2 ? -beta.x : -beta.y, 0.f);
          of_own[j] = fmaf(x, j < 2 ? of_unit.x : of_unit.y, 0.f);
        }
        put_half<T>(with_col, i, of_col);
        if (!kDirect) put_half<T>(with_row, i, of_own);
        if (gated) add_kept(of_row, cols + 4 * block + 2 * i, kept, of_unit);
      }
      if (!Tiles::kOwn && !kDirect) step_rows.put(block_of(place.band, 2 * half + block), with_col);
      step_cols.put(block_of(place.band, 2 * half + block), kDirect ? with_col : with_row);
    }
    if (gated) put_columns(tile.later->row_cols[place.band], 32 * half, cols);
  }
  of_beta = sum_over_rows(of_beta);
  put_rows(tile.sums->beta[GradientSizes<D>::kParts], mine, {-unit.x * of_beta.x, -unit.y * of_beta.y});
  if (gated) {
    of_row = sum_over_rows(of_row);
    put_rows(tile.later->row, mine, {of_unit.x * of_row.x, of_unit.y * of_row.y});
  }
}

// From do U^T: dP with its factors, with the factor of the token for dk and with the factor of the row for
// dq, and the sums with P. The blocks whose rows are all after the tokens are neither stored nor read. If the
// only factor is the scale, one block serves both.
template <Factors factors, typename T, int D, bool OneSlab>
__device__ inline void weigh_queries(const DeltaGradients& p, const WarpPlace& place,
                                     const GradientTiles<T, D, OneSlab>& tile, Vectors vectors,
                                     Sums<8>& products) {
  using Tiles = GradientTiles<T, D, OneSlab>;
  const Blocks of_tokens = tile.blocks(Tiles::kOfTokens), of_rows = tile.blocks(Tiles::kOfRows);
  const int n = p.shape.n, token = place.mine;
  const bool many_tokens = tile.here->many_tokens;
  const int first = token * n, first_below = (token + 8) * n;  // first rows of the tokens
  constexpr bool kDirect = factors == Factors::none, kScaled = kScalesBefore<T, factors>;
  const bool gated = factors == Factors::any && p.gated;
  const float2 factor = kDirect ? make_float2(p.shape.scale, p.shape.scale)
                                : make_float2(tile.factors[token], tile.factors[token + 8]);
  const bool has_tokens = place.band < tile.here->bands();
  if (gated) {
    const float2 log = {vectors.element(kDeltaLog, min(first, kDeltaRows - 1)),
                        vectors.element(kDeltaLog, min(first_below, kDeltaRows - 1))};
    decay(products, vectors, log, [&](int block) { return Here::follow(place.band, block, n); });
  }
  float2 of_token = {0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Q K^T
    Sums<4> scores;
    fill(scores, 0.f);
    if (gated) add_scores<T>(tile.origin, scores, tile.q, tile.k, 32 * half);
    if (!has_tokens || !Here::follow(place.band, 2 * half, n)) continue;
    float cols[8];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int col = 32 * half + 16 * block;
      if (!Here::follow(place.band, col / kTileRows, n)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) cols[4 * block + i] = 0.f;
        continue;
      }
      uint32_t with_token[4], with_row[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 unit_j = kDirect ? make_float2(1.f, 1.f) : vectors.pair(kDeltaUnit, col + 8 * i);
        float kept[4], of_factor[4], of_rho[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int start = j < 2 ? first : first_below, r = col + 8 * i + lane_col() + j % 2;
          const float x = r < start + n ? products.at[col / 8 + i][j] : 0.f;
          of_factor[j] = (j < 2 ? factor.x : factor.y) * x;
          of_rho[j] = (j % 2 == 0 ? unit_j.x : unit_j.y) * x;
          kept[j] = r < start ? scores.at[2 * block + i][j] * of_rho[j] : 0.f;
        }
        put_half<T>(with_token, i, of_factor);
        if (!kScaled) put_half<T>(with_row, i, of_rho);
        if (gated) add_kept(of_token, cols + 4 * block + 2 * i, kept, factor);
      }
      const int at = Blocks::of_tokens(many_tokens, place.band, 2 * half + block);
      of_tokens.put(at, with_token);
      if (!kScaled) of_rows.put(at, with_row);
    }
    if (gated) put_columns(tile.later->token_cols[place.band], 32 * half, cols);
  }
  if (gated && has_tokens) {
    of_token = sum_over_rows(of_token);
    put_rows(tile.later->token, token, {factor.x * of_token.x, factor.y * of_token.y});
  }
}

}  // namespace girih::kernels::delta_product

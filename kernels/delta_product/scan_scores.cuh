// The scores of the scan, by four warps beside the chain: for every chunk and query head
//
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)        scale rho_t e^{L_t}
//
// rounded to where the chain's products find them. What lies above the diagonal is zero from the start.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

// The 16 x 16 tiles of P on and below the diagonal, from the last token's band down.
struct ScoreTiles {
  int n, bands;

  __device__ ScoreTiles(int n, int tokens) : n(n), bands((tokens + kTileRows - 1) / kTileRows) {}

  // Of keys that a band's tokens see.
  __device__ int of_band(int band) const { return min(n * (band + 1), kTilesDown); }
  __device__ int count() const {
    int all = 0;
    for (int b = 0; b < bands; ++b) all += of_band(b);
    return all;
  }
  __device__ void find(int number, int& band, int& tile) const {
    for (band = bands - 1; number >= of_band(band); --band) number -= of_band(band);
    tile = number;
  }
};

template <typename T, int D, int Rows>
__device__ inline void score(const DeltaScan& p, const Stage<T, D>& stage,
                             const QueryStage<T, D, Rows>& query, int band, int tile) {
  constexpr int kDepth = D / 16;
  const int n = p.shape.n, first = kTileRows * band, row = kTileRows * tile;
  const Vectors vectors = stage.prepared().vectors();
  // Two sums each, of every other part of D: one alone waits for itself.
  Sums<2> scores[2];
  fill(scores[0], 0.f), fill(scores[1], 0.f);
  float2 square = {0.f, 0.f};
#pragma unroll(D == 64 ? 4 : 8)
  for (int k = 0; k < kDepth; ++k) {
    uint32_t q[4], key[4];
    load_block(q, query.q(), first, 16 * k);
    load_matrices(key,
                  stage.k().address(row, 16 * k, (lane() & 7) + (lane() >> 4) * 8, ((lane() >> 3) & 1) * 8));
    mma<T>(scores[k % 2].at[0], q, key[0], key[1]);
    mma<T>(scores[k % 2].at[1], q, key[2], key[3]);
    if (p.shape.unit) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpaired<T>(q[i]);
        float& sum = i % 2 == 0 ? square.x : square.y;
        sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
      }
    }
  }

  float2 factor = {p.shape.scale, p.shape.scale};  // scale rho_t
  if (p.shape.unit) {
    factor.x *= rsqrtf(sum_over_row(square.x) + 1e-6f);
    factor.y *= rsqrtf(sum_over_row(square.y) + 1e-6f);
  }
  const int token = first + lane_row();  // and 8 further
  const float2 decay = {vectors.element(kDeltaLog, min(token * n, kDeltaRows - 1)),
                        vectors.element(kDeltaLog, min((token + 8) * n, kDeltaRows - 1))};
  if (tile == 0 && lane_col() == 0) {
    query.factors()[token] = factor.x * exp2_fast(decay.x);
    query.factors()[token + 8] = factor.y * exp2_fast(decay.y);
  }

  const bool weighted = p.gated || p.shape.unit;  // else every factor but the scale is 1
  const bool crosses = row + kTileRows > (first + 1) * n;
  const int seen = (token + 1) * n - lane_col();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float(&x)[4] = scores[0].at[half];
    const int at = row + 8 * half;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += scores[1].at[half][i];
    if (weighted) {
      const float2 before = vectors.pair(kDeltaLog, at), unit = vectors.pair(kDeltaUnit, at);
      x[0] *= factor.x * unit.x * exp2_fast(decay.x - before.x);
      x[1] *= factor.x * unit.y * exp2_fast(decay.x - before.y);
      x[2] *= factor.y * unit.x * exp2_fast(decay.y - before.x);
      x[3] *= factor.y * unit.y * exp2_fast(decay.y - before.y);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] *= p.shape.scale;
    }
    if (crosses) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = at + i % 2 < seen + i / 2 * 8 * n ? x[i] : 0.f;
    }
  }
  Operand<1> rounded;
  round_to<T>(rounded, scores[0]);
  store_block(query.p(), first, row, rounded.at[0]);
}

template <typename T, int D, int Rows>
__device__ inline void run_scores(const ScanPass& pass, const Part& part, const ScanSpace<T, D, Rows>& space,
                                  int warp) {
  constexpr int kWarps = ScanRoles<Rows>::kScores;
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, group = p.shape.query_heads / p.shape.heads;
  ScanBarriers& barriers = space.barriers();
  const ScoreTiles tiles(n, delta_chunk(n));
  const int each = (tiles.count() + kWarps - 1) / kWarps;
  const int begin = each * warp, end = min(begin + each, tiles.count());
  Turn turn, query_turn;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const Stage<T, D> stage = space.stage(turn.place);
    wait(&barriers.full[turn.place], turn.parity);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      wait(&barriers.query_full[query_turn.place], query_turn.parity);
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        int band, tile;
        tiles.find(i, band, tile);
        score(p, stage, space.query(query_turn.place), band, tile);
      }
      arrive(&barriers.scored[query_turn.place]);
      query_turn.next(pass.stages);
    }
    turn.next(pass.stages);
  }
}

}  // namespace girih::kernels::delta_product

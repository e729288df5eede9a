// The scores of the scan, by warps beside the chain: for every chunk and query head
//
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)        scale rho_t e^{L_t}
//
// rounded to where the readers find them. What lies above the diagonal is zero from the start.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

// Of Tiles tiles of P, 16 x 16 each, the `count` from keys `row` on, of the tokens from `first` on: all at
// once, for a product by itself waits for itself.
template <int Tiles, typename T, int D, int Rows>
__device__ inline void score(const DeltaScan& p, const Stage<T, D>& stage,
                             const QueryStage<T, D, Rows>& query, int first, int row, int count) {
  const int n = p.shape.n;
  const Vectors vectors = stage.prepared().vectors();
  Sums<2> scores[Tiles];
#pragma unroll
  for (int i = 0; i < Tiles; ++i) fill(scores[i], 0.f);
  float2 square = {0.f, 0.f};
  // All of 64 columns first: what follows each load would wait for it alone. A tile too many is there too.
#pragma unroll
  for (int col = 0; col < D; col += 64) {
    Operand<4> q, keys[Tiles];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      load_block(q.at[k], query.q(), first, col + 16 * k);
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        load_matrices(keys[i].at[k],
                      stage.k().address(row + 16 * i, col + 16 * k, (lane() & 7) + (lane() >> 4) * 8,
                                        ((lane() >> 3) & 1) * 8));
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        mma<T>(scores[i].at[0], q.at[k], keys[i].at[k][0], keys[i].at[k][1]);
        mma<T>(scores[i].at[1], q.at[k], keys[i].at[k][2], keys[i].at[k][3]);
      }
    }
    if (p.shape.unit) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = unpaired<T>(q.at[k][i]);
          float& sum = i % 2 == 0 ? square.x : square.y;
          sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
        }
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
  if (row == 0 && lane_col() == 0) {
    query.factors()[token] = factor.x * exp2_fast(decay.x);
    query.factors()[token + 8] = factor.y * exp2_fast(decay.y);
  }

  const bool weighted = p.gated || p.shape.unit;  // else every factor but the scale is 1
  const int seen = (token + 1) * n - lane_col();
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
    if (i >= count) continue;
    const int tile = row + kTileRows * i;
    const bool crosses = tile + kTileRows > (first + 1) * n;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&x)[4] = scores[i].at[half];
      const int at = tile + 8 * half;
      if (weighted) {
        const float2 before = vectors.pair(kDeltaLog, at), unit = vectors.pair(kDeltaUnit, at);
        x[0] *= factor.x * unit.x * exp2_fast(decay.x - before.x);
        x[1] *= factor.x * unit.y * exp2_fast(decay.x - before.y);
        x[2] *= factor.y * unit.x * exp2_fast(decay.y - before.x);
        x[3] *= factor.y * unit.y * exp2_fast(decay.y - before.y);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] *= p.shape.scale;
      }
      if (crosses) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = at + j % 2 < seen + j / 2 * 8 * n ? x[j] : 0.f;
      }
    }
    Operand<1> rounded;
    round_to<T>(rounded, scores[i]);
    store_block(query.p(), first, tile, rounded.at[0]);
  }
}

// Two tiles of a band of tokens at a time, dealt out anew in every chunk: of four bands with one step a token
// some have one to see, some two.
template <typename T, int D, int Rows>
__device__ inline void run_scores(const ScanPass& pass, const Part& part, const ScanSpace<T, D, Rows>& space,
                                  int warp) {
  constexpr int kTiles = 2, kOfBand = kTilesDown / kTiles, kWarps = ScanRoles<Rows>::kScores;
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, group = p.shape.query_heads / p.shape.heads;
  const int bands = (delta_chunk(n) + kTileRows - 1) / kTileRows;
  ScanBarriers& barriers = space.barriers();
  Turn turn, query_turn;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const Stage<T, D> stage = space.stage(turn.place);
    wait(&barriers.full[turn.place], turn.parity);
    if (warp == c % kWarps) {
      // For the chain, a tenth of whose time this fence was.
      fence_tiles();
      arrive(&barriers.ready[turn.place]);
    }
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      wait(&barriers.query_full[query_turn.place], query_turn.parity);
#pragma unroll 1
      for (int unit = (warp + c) % kWarps; unit < bands * kOfBand; unit += kWarps) {
        const int band = bands - 1 - unit / kOfBand, tile = unit % kOfBand * kTiles,
                  count = min(n * (band + 1), kTilesDown) - tile;
        if (count <= 0) continue;
        score<kTiles>(p, stage, space.query(query_turn.place), kTileRows * band, kTileRows * tile, count);
      }
      fence_tiles();  // for the query's tile too, which the products read as they do P
      arrive(&barriers.scored[query_turn.place]);
      query_turn.next(pass.queries);
    }
    arrive(&barriers.empty[turn.place]);
    turn.next(pass.stages);
  }
}

}  // namespace girih::kernels::delta_product

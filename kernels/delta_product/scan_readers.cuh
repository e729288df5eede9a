// The output warps of the scan for one step a token (tiles of 64 tokens). Chunks are assigned to warpgroups
// round-robin; warp w has tokens 16 w to 16 w + 15:
//
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//
// q stays in registers for both of its products, and so does P. The scores do not depend on the state warps
// and are computed one step ahead. S and U come from the state warps by shared memory.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

// 1 / |q_t| of the lane's two rows.
template <typename T, int K>
__device__ inline float2 inverse_lengths(const Operand<K>& q) {
  float2 square = {0.f, 0.f};
  each_sum<K>([&](int k, int i) {
    const float2 x = unpaired<T>(q.at[k][i]);
    float& sum = i % 2 == 0 ? square.x : square.y;
    sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
  });
  return {rsqrtf(sum_over_row(square.x) + 1e-6f), rsqrtf(sum_over_row(square.y) + 1e-6f)};
}

// P from scores q_t . k_j, for 16 tokens from `first` on. factor: scale rho_t, log: L_t, both of the lane's
// two rows.
__device__ inline void weigh(Sums<8>& scores, const Vectors& vectors, int n, int first, bool weighted,
                             float2 factor, float2 log) {
  const int seen_by_all = (first + 1) * n, seen = (first + kTileRows) * n;
  if (weighted) {
#pragma unroll
    for (int tile = 0; tile < kTilesDown; ++tile) {
      if (tile * kTileRows >= seen) continue;
#pragma unroll
      for (int i = 2 * tile; i < 2 * tile + 2; ++i) {
        float(&x)[4] = scores.at[i];
        const float2 before = vectors.pair(kDeltaLog, 8 * i), unit = vectors.pair(kDeltaUnit, 8 * i);
        x[0] *= factor.x * unit.x * exp2_fast(log.x - before.x);
        x[1] *= factor.x * unit.y * exp2_fast(log.x - before.y);
        x[2] *= factor.y * unit.x * exp2_fast(log.y - before.x);
        x[3] *= factor.y * unit.y * exp2_fast(log.y - before.y);
      }
    }
  } else {
    scale_rows(scores, factor);
  }
  const int left = (first + lane_row() + 1) * n - lane_col();
#pragma unroll
  for (int tile = 0; tile < kTilesDown; ++tile) {
    if ((tile + 1) * kTileRows <= seen_by_all) continue;
#pragma unroll
    for (int i = 2 * tile; i < 2 * tile + 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores.at[i][j] = 8 * i + j % 2 < left + j / 2 * 8 * n ? scores.at[i][j] : 0.f;
      }
    }
  }
}

template <bool Apart, typename T, int D, int Rows, bool ReadKeys>
__device__ inline void run_readers(const ScanPass& pass, const Part& part,
                                   const ScanSpace<T, D, Rows, ReadKeys>& space, int reader, int warp) {
  if (reader >= pass.readers || reader >= part.chunks) return;
  // The next scores are computed while an output is stored, if registers suffice for both. (Across the end of
  // the loop the compiler would insert a wait after each wgmma.)
  constexpr bool kAhead = D == 64;
  const DeltaScan& p = pass.scan;
  using Space = ScanSpace<T, D, Rows, ReadKeys>;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads,
            cols = p.shape.V - part.col;
  const int first = kTileRows * warp, row = first + lane_row();
  const bool weighted = p.gated || p.shape.unit;  // else every factor but the scale is 1
  ScanBarriers& barriers = space.barriers();
  Turn turn, slot;
  if (reader > 0) turn.skip(reader, pass.stages), slot.skip(reader, pass.slots);
  // A warpgroup that skips chunks never waits for a phase that is two phases ahead: there are at most as many
  // warpgroups as stages of each ring, and stages are filled in the order of chunks.

  // A warp loads its own rows of q as soon as the previous rows are in registers; the two load warps are
  // busy.
  const auto rows_of_q = space.query(reader, warp);
  const auto fetch = [&](int chunk, int member) {
    if (chunk < part.chunks) {
      const TileCopier<32, typename Space::Query> rows(
          at<T>(p.q, part.piece.sequence.batch, part.piece.start,
                (static_cast<int64_t>(part.head) * group + member) / p.shape.query_share, 0),
          p.q.stride[1], p.shape.D, lane());
      const int token = chunk * tokens + first;
      rows.start(rows_of_q, token, tokens_in(part, tokens, chunk) - first);
    }
    commit_copies();
  };
  Operand<D / 16> q;
  Sums<8> scores;
  // Scores of one query head and the keys of a chunk. After the last chunk the result is not used.
  const auto start_scores = [&](int chunk, int member) {
    if (chunk < part.chunks && member == 0) wait(&barriers.ready[turn.place], turn.parity);
    wait_copies<0>();
    __syncwarp();
    load_blocks(q, rows_of_q);
    __syncwarp();
    member + 1 < group ? fetch(chunk, member + 1) : fetch(chunk + pass.readers, 0);
    fence_products();
    start_product_transposed<T, false>(scores, q, space.stage(turn.place).k());
    commit_products();
  };
  fetch(reader, 0);
  start_scores(reader, 0);
  wait_products<0>(scores);
#pragma unroll 1
  for (int c = reader; c < part.chunks; c += pass.readers) {
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const bool last = member + 1 == group;
      const Vectors vectors = space.stage(turn.place).prepared().vectors();
      if (member == 0) {
        wait(&barriers.state[slot.place], slot.parity);
        fence_tiles();
      }
      Sums<8> o;
      fence_products();
      start_product_transposed<T, false>(o, q, space.state(slot.place));
      commit_products();

      float2 factor = {p.shape.scale, p.shape.scale};  // scale rho_t
      if (p.shape.unit) {
        const float2 unit = inverse_lengths<T>(q);
        factor.x *= unit.x, factor.y *= unit.y;
      }
      const float2 log = {vectors.element(kDeltaLog, min(row * n, kDeltaRows - 1)),
                          vectors.element(kDeltaLog, min((row + 8) * n, kDeltaRows - 1))};
      weigh(scores, vectors, n, first, weighted, factor, log);
      if (last) arrive_once(&barriers.empty[turn.place]);
      Operand<kTilesDown> near;
      round_to<T>(near, scores);
      wait_products<0>(o);
      keep(q);
      scale_rows(o, {factor.x * exp2_fast(log.x), factor.y * exp2_fast(log.y)});

      if (member == 0) {
        wait(&barriers.update[slot.place], slot.parity);
        fence_tiles();
      }
      fence_products(o);
      start_product_transposed<T>(o, near, space.update(slot.place));
      commit_products();
      if (last) turn.skip(pass.readers, pass.stages);
      const int next_chunk = last ? c + pass.readers : c, next_member = last ? 0 : member + 1;
      if (kAhead) start_scores(next_chunk, next_member);
      wait_products<kAhead ? 1 : 0>(o);
      keep(near);
      if (last) leave_slot<Apart>(barriers.read[slot.place]);
      T* const to = at<T>(p.o, part.piece.sequence.batch, part.piece.start + c * tokens,
                          static_cast<int64_t>(part.head) * group + member, part.col);
      store_rows<T>(o, to, p.o.stride[1], first, tokens_in(part, tokens, c), cols);
      if (!kAhead) start_scores(next_chunk, next_member);
      wait_products<0>(scores);
    }
    slot.skip(pass.readers, pass.slots);
  }
}

}  // namespace girih::kernels::delta_product

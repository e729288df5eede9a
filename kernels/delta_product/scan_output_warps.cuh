// The output warps of the scan for one step a token (tiles of 64 tokens). Chunks are assigned to warpgroups
// round-robin; warp w has tokens 16 w to 16 w + 15:
//
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//
// q stays in registers for both of its products, and so does P. The scores do not depend on the state warps
// and are computed one step ahead. S and U come from the state warps by shared memory.
#pragma once

#include "delta_product/scan_storage.cuh"

namespace girih::kernels::delta_product {

// 1 / |q_t| of the lane's two rows.
template <typename T, int K>
__device__ inline float2 inverse_lengths(const AFragment<K>& q) {
  float2 square = {0.f, 0.f};
  for_each_register<K>([&](int k, int i) {
    const float2 x = unpack_pair<T>(q.at[k][i]);
    float& sum = i % 2 == 0 ? square.x : square.y;
    sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
  });
  return {rsqrtf(sum_over_row(square.x) + 1e-6f), rsqrtf(sum_over_row(square.y) + 1e-6f)};
}

// P from scores q_t . k_j, for 16 tokens from `first` on: multiplies by the factors, and clears the rows j of
// tokens after t. factor: scale rho_t, log: L_t, both of the lane's two tokens.
__device__ inline void apply_score_factors(Accumulator<8>& scores, const ChunkFactors& chunk_factors, int n,
                                           int first, bool has_factors, float2 factor, float2 log) {
  const int visible_to_all = (first + 1) * n, visible = (first + kTileRows) * n;
  if (has_factors) {
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile) {
      if (tile * kTileRows >= visible) continue;
#pragma unroll
      for (int i = 2 * tile; i < 2 * tile + 2; ++i) {
        float(&x)[4] = scores.at[i];
        const float2 row_log = chunk_factors.pair(kDeltaLogDecay, 8 * i),
                     rho = chunk_factors.pair(kDeltaRho, 8 * i);
        x[0] *= factor.x * rho.x * exp2_fast(log.x - row_log.x);
        x[1] *= factor.x * rho.y * exp2_fast(log.x - row_log.y);
        x[2] *= factor.y * rho.x * exp2_fast(log.y - row_log.x);
        x[3] *= factor.y * rho.y * exp2_fast(log.y - row_log.y);
      }
    }
  } else {
    scale_rows(scores, factor);
  }
  const int visible_rows = (first + lane_row() + 1) * n - lane_col();
#pragma unroll
  for (int tile = 0; tile < kChunkTiles; ++tile) {
    if ((tile + 1) * kTileRows <= visible_to_all) continue;
#pragma unroll
    for (int i = 2 * tile; i < 2 * tile + 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores.at[i][j] = 8 * i + j % 2 < visible_rows + j / 2 * 8 * n ? scores.at[i][j] : 0.f;
      }
    }
  }
}

template <bool Cluster, typename T, int D, int Rows, bool HasB>
__device__ inline void run_output_warps(const ScanParams& params, const BlockWork& work,
                                        const ScanStorage<T, D, Rows, HasB>& storage, int output_group,
                                        int warp) {
  if (output_group >= params.output_groups || output_group >= work.chunks) return;
  // The next scores are computed while an output is stored, if registers suffice for both. (Across the end of
  // the loop the compiler would insert a wait after each wgmma.)
  constexpr bool kPrefetchScores = D == 64;
  const DeltaScan& p = params.problem;
  using Storage = ScanStorage<T, D, Rows, HasB>;
  const int n = p.shape.n, tokens = delta_chunk_tokens(n), group = p.shape.output_heads / p.shape.heads,
            cols = p.shape.V - work.col;
  const int first = kTileRows * warp, row = first + lane_row();
  const bool has_factors = p.gated || p.shape.unit;  // else every factor but the scale is 1
  ScanBarriers& barriers = storage.barriers();
  PipelineState key_pipe, state_pipe;
  if (output_group > 0)
    key_pipe.skip(output_group, params.stages), state_pipe.skip(output_group, params.state_stages);
  // A warpgroup that skips chunks never waits for a phase that is two phases ahead: there are at most as many
  // warpgroups as stages of each ring, and stages are filled in the order of chunks.

  // A warp loads its own rows of q as soon as the previous rows are in registers; the two load warps are
  // busy.
  const auto query_tile = storage.query(output_group, warp);
  const auto load_query = [&](int chunk, int member) {
    if (chunk < work.chunks) {
      const TileCopier<32, typename Storage::Query> rows(
          at<T>(p.q, work.range.sequence.batch, work.range.start,
                (static_cast<int64_t>(work.head) * group + member) / p.shape.query_share, 0),
          p.q.stride[1], p.shape.D, lane());
      const int token = chunk * tokens + first;
      rows.start(query_tile, token, chunk_length(work, tokens, chunk) - first);
    }
    commit_copies();
  };
  AFragment<D / 16> q;
  Accumulator<8> scores;
  // Scores of one query head and the keys of a chunk. After the last chunk the result is not used.
  const auto start_scores = [&](int chunk, int member) {
    if (chunk < work.chunks && member == 0) barriers.proxy_full.wait(key_pipe);
    wait_copies<0>();
    __syncwarp();
    load_blocks(q, query_tile);
    __syncwarp();
    member + 1 < group ? load_query(chunk, member + 1) : load_query(chunk + params.output_groups, 0);
    wgmma_fence();
    wgmma_start_transposed<T, false>(scores, q, storage.stage(key_pipe.stage).k());
    wgmma_commit();
  };
  load_query(output_group, 0);
  start_scores(output_group, 0);
  wgmma_wait<0>(scores);
#pragma unroll 1
  for (int c = output_group; c < work.chunks; c += params.output_groups) {
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const bool last = member + 1 == group;
      const ChunkFactors chunk_factors = storage.stage(key_pipe.stage).prepared().chunk_factors();
      if (member == 0) {
        barriers.state_full.wait(state_pipe);
        fence_async_proxy();
      }
      Accumulator<8> o;
      wgmma_fence();
      wgmma_start_transposed<T, false>(o, q, storage.state(state_pipe.stage));
      wgmma_commit();

      float2 factor = {p.shape.scale, p.shape.scale};  // scale rho_t
      if (p.shape.unit) {
        const float2 rho = inverse_lengths<T>(q);
        factor.x *= rho.x, factor.y *= rho.y;
      }
      const float2 log = {chunk_factors.element(kDeltaLogDecay, min(row * n, kDeltaChunkRows - 1)),
                          chunk_factors.element(kDeltaLogDecay, min((row + 8) * n, kDeltaChunkRows - 1))};
      apply_score_factors(scores, chunk_factors, n, first, has_factors, factor, log);
      if (last) barriers.empty.arrive_warp(key_pipe.stage);
      AFragment<kChunkTiles> masked_scores;
      round_to_a_fragment<T>(masked_scores, scores);
      wgmma_wait<0>(o);
      keep_registers(q);
      scale_rows(o, {factor.x * exp2_fast(log.x), factor.y * exp2_fast(log.y)});

      if (member == 0) {
        barriers.update_full.wait(state_pipe);
        fence_async_proxy();
      }
      wgmma_fence(o);
      wgmma_start_transposed<T>(o, masked_scores, storage.update(state_pipe.stage));
      wgmma_commit();
      if (last) key_pipe.skip(params.output_groups, params.stages);
      const int next_chunk = last ? c + params.output_groups : c, next_member = last ? 0 : member + 1;
      if (kPrefetchScores) start_scores(next_chunk, next_member);
      wgmma_wait<kPrefetchScores ? 1 : 0>(o);
      keep_registers(masked_scores);
      if (last) arrive_state_empty<Cluster>(barriers, state_pipe.stage);
      T* const to = at<T>(p.o, work.range.sequence.batch, work.range.start + c * tokens,
                          static_cast<int64_t>(work.head) * group + member, work.col);
      store_rows<T>(o, to, p.o.stride[1], first, chunk_length(work, tokens, c), cols);
      if (!kPrefetchScores) start_scores(next_chunk, next_member);
      wgmma_wait<0>(scores);
    }
    state_pipe.skip(params.output_groups, params.state_stages);
  }
}

}  // namespace girih::kernels::delta_product

// The output warps of the scan for several steps a token (tiles of 32 tokens). Chunks are assigned to
// warpgroups round-robin:
//
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//
// All products are transposed, like those of the state warps: the 64 rows of a product are rows of the chunk
// or columns of V, and its columns are the tokens. With tokens as rows, half of every product would be wasted
// and the state warps would wait. The scores do not depend on the state warps.
#pragma once

#include "delta_product/scan_storage.cuh"

namespace girih::kernels::delta_product {

template <bool Cluster, typename T, int D, int Rows, bool HasB>
__device__ inline void run_transposed_output_warps(const ScanParams& params, const BlockWork& work,
                                                   const ScanStorage<T, D, Rows, HasB>& storage,
                                                   int output_group, int warp) {
  if (output_group >= params.output_groups || output_group >= work.chunks) return;
  constexpr int kTokenGroups = Rows / 8;  // groups of 8 tokens
  const DeltaScan& p = params.problem;
  using Storage = ScanStorage<T, D, Rows, HasB>;
  const int n = p.shape.n, tokens = delta_chunk_tokens(n), group = p.shape.output_heads / p.shape.heads,
            cols = p.shape.V - work.col;
  const bool has_factors = p.gated || p.shape.unit;  // else every factor but the scale is 1
  ScanBarriers& barriers = storage.barriers();
  const auto sync_group = [&] { named_barrier_sync(1 + output_group, 128); };
  PipelineState key_pipe, state_pipe;
  if (output_group > 0)
    key_pipe.skip(output_group, params.stages), state_pipe.skip(output_group, params.state_stages);
  // Phases of barriers: see run_output_warps().

  const TileCopier<128, typename Storage::TransposedOutputStorage::Query> queries(
      at<T>(p.q, work.range.sequence.batch, work.range.start,
            static_cast<int64_t>(work.head) * group / p.shape.query_share, 0),
      p.q.stride[1], p.shape.D, 32 * warp + lane());
  const auto load_query = [&](int chunk, int member) {
    if (chunk < work.chunks) {
      queries.start(storage.transposed_output_storage(output_group).q, chunk * tokens,
                    chunk_length(work, tokens, chunk), member * p.q.stride[2]);
    }
    commit_copies();
  };
  load_query(output_group, 0);
#pragma unroll 1
  for (int c = output_group; c < work.chunks; c += params.output_groups) {
    barriers.proxy_full.wait(key_pipe);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const bool last = member + 1 == group;
      // The addresses are recomputed for every query head, so that they need no registers across iterations.
      const Storage member_storage{storage.data + opaque_value(0), storage.stages, storage.state_stages,
                                   storage.output_groups};
      const typename Storage::TransposedOutputStorage group_storage =
          member_storage.transposed_output_storage(output_group);
      const Stage<T, D> stage = member_storage.stage(key_pipe.stage);
      const ChunkFactors chunk_factors = stage.prepared().chunk_factors();
      wait_copies<0>();
      fence_async_proxy();
      sync_group();

      // K Q^T, and S^T Q^T
      Accumulator<kTokenGroups> scores, o;
      wgmma_fence();
      wgmma_start_transposed<false>(scores, stage.k(), group_storage.q);
      wgmma_commit();
      if (member == 0) {
        barriers.state_full.wait(state_pipe);
        fence_async_proxy();
      }
      wgmma_fence();
      wgmma_start_transposed<false>(o, member_storage.state(state_pipe.stage), group_storage.q);
      wgmma_commit();

      if (has_factors) {
        compute_token_factors(group_storage.q, p.shape, chunk_factors, warp,
                              [&](int token, float factor, float log) {
                                group_storage.token_factors[token] = {factor, log};
                              });
        sync_group();
      }
      wgmma_wait<1>(scores);
      if (has_factors) {
        apply_score_factors_transposed(scores, chunk_factors, opaque_value(n), warp,
                                       group_storage.token_factors);
      } else {
        scale_scores_transposed(scores, opaque_value(n), warp, p.shape.scale);
      }
      if (last) barriers.empty.arrive_warp(key_pipe.stage);
      AFragment<kTokenGroups / 2> masked_scores;
      round_to_a_fragment<T>(masked_scores, scores);
      store_blocks(group_storage.masked_scores, kTileRows * warp, 0, masked_scores);
      fence_async_proxy();
      wgmma_wait<0>(o);
      sync_group();  // all warps have read q and stored P
      last ? load_query(c + params.output_groups, 0) : load_query(c, member + 1);
      if (has_factors) {
        scale_columns(o, [&](int i) {
          const float4 two =
              *reinterpret_cast<const float4*>(group_storage.token_factors + 8 * i + lane_col());
          return float2{two.x * exp2_fast(two.y), two.z * exp2_fast(two.w)};
        });
      } else {
        scale_columns(o, [&](int) { return float2{p.shape.scale, p.shape.scale}; });
      }

      // o^T += U^T P^T
      if (member == 0) {
        barriers.update_full.wait(state_pipe);
        fence_async_proxy();
      }
      wgmma_fence(o);
      wgmma_start<T>(o, member_storage.update(state_pipe.stage), 0, group_storage.masked_scores);
      wgmma_commit();
      wgmma_wait<0>(o);
      if (last) arrive_state_empty<Cluster>(barriers, state_pipe.stage);
      AFragment<kTokenGroups / 2> rounded;
      round_to_a_fragment<T>(rounded, o);
      store_transposed(group_storage.out, rounded, warp);
      sync_group();
      T* const to = at<T>(p.o, work.range.sequence.batch, work.range.start + c * tokens,
                          static_cast<int64_t>(work.head) * group + member, work.col);
      store_rows<4>(group_storage.out, to, p.o.stride[1], chunk_length(work, tokens, c), cols, warp);
    }
    key_pipe.skip(params.output_groups, params.stages),
        state_pipe.skip(params.output_groups, params.state_stages);
  }
}

}  // namespace girih::kernels::delta_product

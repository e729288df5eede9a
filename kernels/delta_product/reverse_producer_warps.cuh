// The producer warps of reverse: the terms of dU that do not depend on dS, ahead of the state warps.
#pragma once

#include "delta_product/reverse_storage.cuh"
#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

// sum_t P_tj do_t of every chunk; warp w has rows 16 w to 16 w + 15. Also stores scale rho_t to global memory
// for gradients.
template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void run_reverse_producer_warps(const ReverseParams& params, const BlockWork& work,
                                                  const ReverseStorage<T, D, Rows, ReadKeys>& space,
                                                  int warp) {
  constexpr int kTokenGroups = Rows / 8;
  const DeltaReverse& p = params.scan;
  const int n = p.shape.n, group = p.shape.output_heads / p.shape.heads;
  const bool stores_factors = !params.grid.is_local && work.col == 0;
  ReverseBarriers& barriers = space.barriers();
  PipelineState key_pipe, query_pipe, du_pipe;
#pragma unroll 1
  for (int c = work.chunks - 1; c >= 0; --c) {
    Accumulator<8> du;
    fill(du, 0.f);
    wait(&barriers.full[key_pipe.stage], key_pipe.phase);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const ReverseStorage<T, D, Rows, ReadKeys> local_storage{space.data + opaque_value(0), space.stages,
                                                               space.state_stages};
      const auto stage = local_storage.stage(key_pipe.stage);
      const ChunkFactors chunk_factors = stage.prepared().chunk_factors();
      const auto query = local_storage.query(query_pipe.stage);
      wait(&barriers.query_full[query_pipe.stage], query_pipe.phase);
      fence_async_proxy();

      // K Q^T
      Accumulator<kTokenGroups> scores;
      wgmma_fence();
      wgmma_start_transposed<false>(scores, stage.k(), query.q());
      wgmma_commit();
      float* const factors = p.factors + ((work.first_chunk + c) * p.shape.output_heads +
                                          static_cast<int64_t>(work.head) * group + member) *
                                             kDeltaChunkRows;
      for_each_token(query.q(), p.shape, chunk_factors, warp, [&](int token, float factor, float log) {
        query.tokens()[token] = {factor, log};
        query.read()[token] = factor * exp2_fast(log);
        if (!stores_factors) return;
        factors[token] = factor;
        if (Rows < kDeltaChunkRows) factors[Rows + token] = p.shape.scale;  // rows without a token
      });
      named_barrier_sync(1, 32 * kReverseProducerWarps);
      arrive_warp(&barriers.query_factors_full[query_pipe.stage]);
      wgmma_wait<0>(scores);

      // dU += P^T dO
      apply_score_factors_transposed(scores, chunk_factors, opaque_value(n), warp, query.tokens());
      AFragment<kTokenGroups / 2> weights;
      round_to_a_fragment<T>(weights, scores);
      wgmma_fence(du);
      wgmma_start<T>(du, weights, query.dout());
      wgmma_commit();
      wgmma_wait<0>(du);
      keep_registers(weights);
      arrive_warp(&barriers.query_empty[query_pipe.stage]);
      query_pipe.next(params.stages);
    }
    AFragment<kChunkTiles> rounded;
    round_to_a_fragment<T>(rounded, du);
    wait(&barriers.du_empty[du_pipe.stage], du_pipe.phase ^ 1);
    store_blocks(space.du(du_pipe.stage), kTileRows * warp, 0, rounded);
    arrive_warp(&barriers.du_full[du_pipe.stage]);
    du_pipe.next(kReverseDuStages);
    key_pipe.next(params.stages);
  }
}

}  // namespace girih::kernels::delta_product

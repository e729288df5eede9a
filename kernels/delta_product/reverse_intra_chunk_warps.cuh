// The intra-chunk warps of reverse: the term P^T dO of dU, which does not depend on dS, ahead of the state
// warps.
#pragma once

#include "delta_product/reverse_storage.cuh"
#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

constexpr int kIntraChunkBarrier = 1;  // named barrier of the intra-chunk warps

// Computes du_local_j = sum_t P_tj do_t of every chunk; warp w has rows j from 16 w to 16 w + 15. Also stores
// scale rho_t to global memory for gradients.
template <typename T, int D, int Rows, bool HasB>
__device__ inline void run_reverse_intra_chunk_warps(const ReverseParams& params, const BlockWork& work,
                                                     const ReverseStorage<T, D, Rows, HasB>& storage,
                                                     int warp) {
  constexpr int kTokenGroups = Rows / 8;
  const DeltaReverse& p = params.problem;
  const int n = p.shape.n, group = p.shape.output_heads / p.shape.heads;
  const bool saves_factors = !params.grid.is_local && work.col == 0;
  ReverseBarriers& barriers = storage.barriers();
  PipelineState key_pipe, query_pipe, du_local_pipe;
#pragma unroll 1
  for (int c = work.chunks - 1; c >= 0; --c) {
    Accumulator<8> du_local;
    fill(du_local, 0.f);
    barriers.full.wait(key_pipe);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      // The addresses are recomputed for every query head, so that they need no registers across iterations.
      const ReverseStorage<T, D, Rows, HasB> member_storage{storage.data + opaque_value(0), storage.stages,
                                                            storage.state_stages};
      const auto stage = member_storage.stage(key_pipe.stage);
      const ChunkFactors chunk_factors = stage.prepared().chunk_factors();
      const auto query = member_storage.query(query_pipe.stage);
      barriers.query_full.wait(query_pipe);
      fence_async_proxy();

      // K Q^T
      Accumulator<kTokenGroups> scores;
      wgmma_fence();
      wgmma_start_transposed<false>(scores, stage.k(), query.q());
      wgmma_commit();
      float* const saved_factors = p.factors + ((work.first_chunk + c) * p.shape.output_heads +
                                                static_cast<int64_t>(work.head) * group + member) *
                                                   kDeltaChunkRows;
      compute_token_factors(query.q(), p.shape, chunk_factors, warp, [&](int token, float factor, float log) {
        query.token_factors()[token] = {factor, log};
        query.query_factors()[token] = factor * exp2_fast(log);
        if (!saves_factors) return;
        saved_factors[token] = factor;
        // gradients reads 64 entries; those without a token must be finite.
        if (Rows < kDeltaChunkRows) saved_factors[Rows + token] = p.shape.scale;
      });
      named_barrier_sync(kIntraChunkBarrier, 32 * kReverseIntraChunkWarps);
      barriers.query_factors_full.arrive_warp(query_pipe.stage);
      wgmma_wait<0>(scores);

      // du_local += P^T dO
      apply_score_factors_transposed(scores, chunk_factors, opaque_value(n), warp, query.token_factors());
      AFragment<kTokenGroups / 2> masked_scores;
      round_to_a_fragment<T>(masked_scores, scores);
      wgmma_fence(du_local);
      wgmma_start<T>(du_local, masked_scores, query.dout());
      wgmma_commit();
      wgmma_wait<0>(du_local);
      keep_registers(masked_scores);
      barriers.query_empty.arrive_warp(query_pipe.stage);
      query_pipe.next(params.stages);
    }
    AFragment<kChunkTiles> rounded;
    round_to_a_fragment<T>(rounded, du_local);
    barriers.du_local_empty.wait(du_local_pipe);
    store_blocks(storage.du_local(du_local_pipe.stage), kTileRows * warp, 0, rounded);
    barriers.du_local_full.arrive_warp(du_local_pipe.stage);
    du_local_pipe.next(kReverseDuLocalStages);
    key_pipe.next(params.stages);
  }
}

}  // namespace girih::kernels::delta_product

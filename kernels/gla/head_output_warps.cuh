// The output warps of head_read_kernel: warpgroups that compute o. They process chunks round-robin.
#pragma once

#include "gla/head_block.cuh"

namespace girih::kernels {

// o_i = r_i q_i S + sum_j near_ij v_j,   near_ij = scale (q_i . k_j) e^{-|L_i - L_j|},   r = scale e^L, in
// reverse r = e^{L_C - L}
template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::run_output_warps() const {
  const int output_warpgroup = (warp - kFirstStateWarp - kStateWarps<D>) / 4, row_block = warp % 4;
  if (is_local_scan || output_warpgroup >= params.output_warpgroups) return;
  // A warpgroup that skips chunks cannot miss a phase of a barrier: the S of its own chunk comes after all
  // previous phases.
  constexpr bool kHoldsQueries = kHasQueriesInRegisters<D>;
  PipelineState stage_pipe, value_pipe, state_pipe;
  stage_pipe.skip(output_warpgroup, params.stages), value_pipe.skip(output_warpgroup, params.value_stages),
      state_pipe.skip(output_warpgroup, params.state_stages);
#pragma unroll 1
  for (int step = output_warpgroup; step < range.chunks; step += params.output_warpgroups) {
    const Stage stage = stage_at(stage_pipe.stage);
    const State state_tile = state_at(state_pipe.stage);
    const float* sums = ring.sums[value_pipe.stage];
    const int token = range.first_token(step);

    Accumulator<8> scores, o;
    fill(scores, 0.f);
    fill(o, 0.f);
    ring.full.wait(value_pipe);
    AFragment<kHoldsQueries ? D / 16 : 1> q;
    if constexpr (kHoldsQueries) {
      load_blocks(q, stage.q, kWarpRows * row_block);
    }
    fence_async_proxy();
    wgmma_fence(scores);
    if constexpr (kHoldsQueries) {
      wgmma_start_transposed<T>(scores, q, stage.k);
    } else {
      wgmma_start_transposed(scores, stage.q, stage.k);
    }
    wgmma_commit();
    ring.state_full.wait(state_pipe);
    wgmma_fence(o);
    if constexpr (kHoldsQueries) {
      wgmma_start_transposed<T>(o, q, state_tile);
    } else {
      wgmma_start_transposed(o, stage.q, state_tile);
    }
    wgmma_commit();
    wgmma_wait<1>(scores);
    if (kHoldsQueries) ring.stage_empty.arrive(stage_pipe.stage);
    decay_scores(scores, sums, shape.scale, row_block, Reverse);
    AFragment<4> near;
    round_to_a_fragment<T>(near, scores);
    wgmma_wait<0>(o);
    if constexpr (kHoldsQueries) keep_registers(q);
    ring.state_empty.arrive(state_pipe.stage);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sums[kWarpRows * row_block + lane_row() + 8 * i];
      const float r = Reverse ? exp2_fast(sums[kChunk - 1] - sum) : shape.scale * exp2_fast(sum);
#pragma unroll
      for (int n = 0; n < 8; ++n) o.at[n][2 * i] *= r, o.at[n][2 * i + 1] *= r;
    }
    wgmma_fence(o);
    wgmma_start<T>(o, near, values_at(value_pipe.stage));
    wgmma_commit();
    wgmma_wait<0>(o);
    keep_registers(near);

    ring.values_empty.arrive(value_pipe.stage);

    // Without a buffer of their own, the stores use the tile of q, which all four warps have read.
    if (!kHoldsQueries) named_barrier_sync(1, 128);
    const SharedTile<T, kChunk, kSlab> out =
        kHoldsQueries ? output_buffer_at(output_warpgroup).block(0) : stage.q.block(0);
    const TokenRange chunk_range{range.sequence, 0, range.start + token, range.count_rows(token)};
    store_rows_as<T>(o, out, row_block, p.o, chunk_range, query_head, col, shape.V);
    if (!kHoldsQueries) ring.stage_empty.arrive(stage_pipe.stage);
    stage_pipe.skip(params.output_warpgroups, params.stages),
        value_pipe.skip(params.output_warpgroups, params.value_stages);
    state_pipe.skip(params.output_warpgroups, params.state_stages);
  }
}

}  // namespace girih::kernels

// The state warps of scan_fused, which compute the output too.
#pragma once

#include "delta_product/fused_storage.cuh"
#include "delta_product/scan_state_warps.cuh"

namespace girih::kernels::delta_product {

// Starts sums = S^T x^T, or with `Add` sums += Sign S^T x^T.
template <bool Add, int Sign, typename T, int D, int N, int Rows>
__device__ inline void start_read(Accumulator<N>& sums, const RoundedState<T, D>& s,
                                  const BlockTile<T, D, Rows>& x) {
  static_assert(RoundedState<T, D>::kHasAllSlabs);
  wgmma_start_transposed<T, Add, Sign>(sums, s.slab[0], x, 0);
#pragma unroll
  for (int i = 1; i < State<D>::kSlabs; ++i) {
    wgmma_start_transposed<T, true, Sign>(sums, s.slab[i], x, 64 * i);
  }
  wgmma_commit();
}

// Loads the columns of v of the warp.
template <typename T, int Cols>
__device__ inline void load_values(ColumnFragments& values, const BlockTile<T, Cols>& v, int warp) {
#pragma unroll
  for (int j = 0; j < kChunkTiles; ++j) load_block_transposed(values[j], v, 16 * warp, 16 * j);
}

// o_t *= r_t, or o_t *= scale without factors.
template <bool HasFactors, int N>
__device__ inline void scale_output(Accumulator<N>& o, const float* query_factors, float scale) {
  if constexpr (HasFactors) {
    scale_columns(
        o, [&](int i) { return *reinterpret_cast<const float2*>(query_factors + 8 * i + lane_col()); });
  } else {
    scale_columns(o, [&](int) { return float2{scale, scale}; });
  }
}

// As run_state_warps() of scan_state_warps.cuh, with the output. HasFactors: some rho differs from 1 or some
// L from 0.
template <bool HasFactors, typename T, int D, int Rows, int StateGroups>
__device__ inline void run_fused_state_warps(const ScanParams& params, const BlockWork& work,
                                             const FusedStorage<T, D, Rows, StateGroups>& storage, int warp) {
  constexpr int kTokenGroups = Rows / 8;
  const DeltaScan& p = params.problem;
  const int first_col = work.col + 16 * warp;
  const bool has_states = p.states != nullptr;
  FusedBarriers& barriers = storage.barriers();

  State<D> s;  // S^T
  load_initial_state(s, p.shape, params.grid, work, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.set(s);
  ColumnFragments values;              // v
  AFragment<kTokenGroups / 2> output;  // of the previous chunk

  PipelineState key_pipe, query_pipe, state_pipe,
      previous_query_pipe;  // previous_query_pipe: query_pipe of the previous chunk
  // Stores the output to the memory of the queries. With one state warpgroup no warp still reads the queries,
  // because a product is collective and this warp has waited for it. With two, the other warpgroup may still
  // read them.
  const auto store_output = [&] {
    if constexpr (StateGroups == 2) {
      barriers.query_empty.wait_for_release(previous_query_pipe);
    } else if constexpr (!ptx::kIsWgmmaCollective) {
      named_barrier_sync(1 + FusedRoles<1>::kIntraChunkGroups,
                         32 * FusedRoles<1>::kStateWarps);  // mma.sync is per warp
    }
    store_transposed(storage.output(previous_query_pipe.stage), output, warp);
    barriers.output_full.arrive_warp(previous_query_pipe.stage);
  };
  const auto load_next_values = [&] {
    barriers.scores_full.wait(query_pipe);
    load_values(values, storage.values(key_pipe.stage), warp);
  };
  if (work.chunks > 0) load_next_values();
#pragma unroll 1
  for (int c = 0; c < work.chunks; ++c) {
    const auto stage = storage.stage(key_pipe.stage);
    const Prepared prepared = stage.prepared();
    const ChunkFactors chunk_factors = prepared.chunk_factors();

    // Loads are issued ahead of the products that hide their latency.
    const bool has_inverse_lo = prepared.has_inverse_lo();
    const float log_end = HasFactors ? chunk_factors.element(kDeltaLogDecay, kDeltaChunkRows - 1) : 0.f;
    const bool is_inverse_weighted = can_weigh_inverse<T>(has_inverse_lo, log_end);
    const RowFactorFragment read_factors = HasFactors && StateGroups == 1
                                               ? RowFactorFragment(chunk_factors, kDeltaReadFactor)
                                               : RowFactorFragment();

    // Y^T = S^T K^T, or directly v^T - Y^T; and S^T Q^T, with two state warpgroups later because registers
    // are scarce.
    Accumulator<8> y, z;
    if constexpr (HasFactors) {
      wgmma_fence();
      start_read<false, 1>(y, rounded, stage.k());
    } else {
      convert_values<T>(z, values);
      wgmma_fence(z);
      start_read<true, -1>(z, rounded, stage.k());
    }
    Accumulator<kTokenGroups> o;
    if constexpr (StateGroups == 1) start_read<false, 1>(o, rounded, storage.query(query_pipe.stage));
    if (c > 0) store_output();
    if (has_states) {
      barriers.state_empty.wait(state_pipe);
      rounded.store(s, storage.state(state_pipe.stage), warp);
      barriers.state_full.arrive_warp(state_pipe.stage);
      state_pipe.next(params.state_stages);
    }
    // Z_i = v_i - a_i Y_i (the intra-chunk warps have replaced read_i by a_i). If `has_inverse_lo`, X does
    // not contain beta, and Z_i is multiplied by beta_i.
    if constexpr (HasFactors) {
      convert_values<T>(z, values);
      wgmma_wait<2 - StateGroups>(y);
      subtract_read(z, StateGroups == 2 ? RowFactorFragment(chunk_factors, kDeltaReadFactor) : read_factors,
                    y);
    } else {
      wgmma_wait<2 - StateGroups>(z);
    }
    if (__builtin_expect(has_inverse_lo, false)) {
      scale_columns(z, [&](int i) { return chunk_factors.pair(kDeltaBeta, 8 * i); });
    }
    AFragment<kChunkTiles> rounded_z;
    round_to_a_fragment<T>(rounded_z, z);

    // U^T = Z^T Xb^T; S decays during the product
    ChunkAccumulator u;
    start_inverse_product<T>(u, rounded_z, stage.inverse());
    if constexpr (StateGroups == 2) start_read<false, 1>(o, rounded, storage.query(query_pipe.stage));
    if (HasFactors) scale(s, exp2_fast(log_end));
    wgmma_wait<StateGroups - 1>(u[0], u[1]);
    keep_registers(rounded_z);
    if constexpr (StateGroups == 1) rounded.keep();
    if (__builtin_expect(has_inverse_lo, false)) {
      add_inverse_lo_product<T>(u, rounded_z,
                                prepared_at(p.prepared, p.shape, work.first_chunk + c, work.head));
    }

    // S^T <- e^{L_C} S^T + (w * U)^T K; if `is_inverse_weighted`, X yields w U
    const bool use_update_factors = HasFactors && !is_inverse_weighted;
    AFragment<kChunkTiles> solution;
    if (__builtin_expect(use_update_factors, false)) {
      ChunkAccumulator weighted = {u[0], u[1]};
      scale_chunk_rows(weighted, [&](int row) { return chunk_factors.pair(kDeltaWriteFactor, row); });
      round_to_a_fragment<T>(solution, weighted);
    } else {
      round_to_a_fragment<T>(solution, u);
    }
    start_update<T>(s, solution, stage.k());

    // Loads the next values during the update; then o^T += U^T P^T.
    const int key_stage = key_pipe.stage;
    previous_query_pipe = query_pipe;
    key_pipe.next(params.stages), query_pipe.next(params.query_stages);
    if (c + 1 < work.chunks) load_next_values();
    if constexpr (StateGroups == 2) {
      wgmma_wait<1>(o);
      rounded.keep();
      barriers.query_empty.arrive_warp(previous_query_pipe.stage);
    } else {
      pin_registers(o);
    }
    if (__builtin_expect(use_update_factors, false)) {
      wait_state<0>(s);
      keep_registers(solution);
      round_to_a_fragment<T>(solution, u);
    }
    scale_output<HasFactors>(o, storage.query_factors(previous_query_pipe.stage), p.shape.scale);
    wgmma_fence(o);
    wgmma_start<T>(o, solution, storage.masked_scores(previous_query_pipe.stage));
    wgmma_commit();
    wait_state<1>(s);
    rounded.set(s);
    wgmma_wait<0>(o);
    keep_registers(solution);
    barriers.empty.arrive_warp(key_stage);
    round_to_a_fragment<T>(output, o);
  }
  if (work.chunks > 0) store_output();
  store_final_state(s, p.shape, params.grid, work, first_col, p.final);
}

}  // namespace girih::kernels::delta_product

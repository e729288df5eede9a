// The state warps of reverse: one warpgroup with dS^T; warp w has 16 of the 64 columns of the block. As in
// scan_state_warps.cuh the accumulator of a product, rounded, is the A fragment of the next one.
#pragma once

#include "delta_product/reverse_storage.cuh"

namespace girih::kernels::delta_product {

// Starts S^T += a Q with a = (r * dO)^T, the columns of the warp.
template <int Bands, typename T, int D, int Rows>
__device__ inline void start_queries(State<D>& s, AFragment<Bands>& a, const QueryStage<T, D, Rows>& query,
                                     int warp) {
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
    load_scaled_transposed<T>(a.at[b], query.dout(), 16 * warp, kTileRows * b, query.read() + kTileRows * b);
  }
  fence_state(s);
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
#pragma unroll
    for (int i = 0; i < State<D>::kSlabs; ++i) {
      wgmma_start<T>(s.slab[i], a.at[b], query.q(), 64 * i, kTileRows * b);
    }
  }
  wgmma_commit();
}

// G^T += dU^T X with mma of single warps; load(x, i, j) loads block (i, j) of X, transposed.
template <typename T, class Load>
__device__ inline void add_transposed_solution(ChunkAccumulator& g, const AFragment<kChunkTiles>& du,
                                               const Load& load) {
#pragma unroll
  for (int i = 0; i < kChunkTiles; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      uint32_t x[4];
      load(x, i, j);
      mma<T>(g[j / 2].at[j % 2 * 2], du.at[i], x[0], x[1]);
      mma<T>(g[j / 2].at[j % 2 * 2 + 1], du.at[i], x[2], x[3]);
    }
  }
}

// Starts G^T = dU^T X.
template <typename T>
__device__ inline void start_transposed_solution(ChunkAccumulator& g, const AFragment<kChunkTiles>& du,
                                                 const InverseTile& x) {
  wgmma_fence();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const auto matrices = [&](int i, int half) {
    return make_descriptor(shared_address(x.data), InverseTile::block(i, 2 * half), 128,
                           InverseTile::kColumnStride);
  };
  wgmma_mma<T, Major::mn, 32, false>(g[0].at, du.at[0], matrices(0, 0));
  wgmma_mma<T, Major::mn, 32, false>(g[1].at, du.at[2], matrices(2, 1));
  wgmma_mma<T, Major::mn, 32>(g[1].at, du.at[3], matrices(3, 1));
#pragma unroll
  for (int i = 1; i < kChunkTiles; ++i) wgmma_mma<T, Major::mn, 32>(g[0].at, du.at[i], matrices(i, 0));
#else
  fill(g[0], 0.f), fill(g[1], 0.f);
  add_transposed_solution<T>(g, du,
                             [&](uint32_t(&block)[4], int i, int j) { x.load_transposed(block, i, j); });
#endif
  wgmma_commit();
}

// G^T += dU^T E, E the rounding errors of X.
template <typename T>
__device__ inline void add_inverse_lo_transposed(ChunkAccumulator& g, const AFragment<kChunkTiles>& du,
                                                 const unsigned char* prepared) {
  add_transposed_solution<T>(g, du, [&](uint32_t(&x)[4], int i, int j) {
    load_inverse_lo(x, prepared, i, j);
#pragma unroll
    for (int m = 0; m < 4; ++m) x[m] = transpose_pairs(x[m]);
  });
}

// y_j <- values_j + w_j y_j, 16 rows j at a time. If `LoadsRows`, load(j) loads values_j here.
template <typename T, bool LoadsRows, class Load>
__device__ inline void add_weighted_rows(Accumulator<8>& y, const RowFactorFragment& write,
                                         const ColumnFragments& values, const Load& load) {
#pragma unroll
  for (int j = 0; j < kChunkTiles; ++j) {
    if (LoadsRows) load(j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&of)[4] = y.at[2 * j + half];
      const float2 by = write.at[2 * j + half];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 value = unpack_pair<T>(values[j][2 * half + i]);
        of[2 * i] = fmaf(by.x, of[2 * i], value.x);
        of[2 * i + 1] = fmaf(by.y, of[2 * i + 1], value.y);
      }
    }
  }
}

// Stores dv or G. (Selecting a reference would place both in local memory.)
template <class Tile>
__device__ inline void store_update(const Tile& tile, bool stores_dv, const AFragment<kChunkTiles>& dv,
                                    const AFragment<kChunkTiles>& g, int warp) {
  if (stores_dv) {
    store_transposed(tile, dv, warp);
  } else {
    store_transposed(tile, g, warp);
  }
}

__device__ inline void wait_for_queries(ReverseBarriers& barriers, const PipelineState& query_pipe) {
  wait(&barriers.query_factors_full[query_pipe.stage], query_pipe.phase);
  fence_async_proxy();
}

template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void run_reverse_state_warps(const ReverseParams& params, const BlockWork& work,
                                               const ReverseStorage<T, D, Rows, ReadKeys>& space, int warp) {
  constexpr bool kHasAllSlabs = RoundedState<T, D>::kHasAllSlabs;
  const DeltaReverse& p = params.scan;
  const int group = p.shape.output_heads / p.shape.heads, first_col = work.col + 16 * warp;
  const bool stores_states = !params.grid.is_local;
  ReverseBarriers& barriers = space.barriers();
  State<D> s;  // dS^T
  load_initial_state(s, p.shape, params.grid, work, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.set(s);

  PipelineState key_pipe, query_pipe, state_pipe, du_pipe;
  ColumnFragments values;
  const auto load_values = [&](int j) {
    load_block_transposed(values[j], space.du(du_pipe.stage), 16 * warp, 16 * j);
  };
  const auto wait_for_stage = [&] {
    wait(&barriers.full[key_pipe.stage], key_pipe.phase);
    wait_for_queries(barriers, query_pipe);
  };
  if (work.chunks > 0) wait_for_stage();
#pragma unroll 1
  for (int c = work.chunks - 1; c >= 0; --c) {
    const auto stage = space.stage(key_pipe.stage);
    const Prepared prepared = stage.prepared();
    const ChunkFactors chunk_factors = prepared.chunk_factors();

    // Y^T = dS^T K^T; with gates dS decays during the product.
    Accumulator<8> y;
    rounded.start_read(y, s, stage.k());
    const RowFactorFragment write(chunk_factors, kDeltaWriteFactor);
    if (stores_states) {
      wait(&barriers.state_empty[state_pipe.stage], state_pipe.phase ^ 1);
      rounded.store(s, space.state(state_pipe.stage), warp);
      arrive_warp(&barriers.state_full[state_pipe.stage]);
    }
    // The products of S are complete. Without this wait the compiler would wait for Y before it uses S.
    wait_state<1>(s);
    if (p.gated) scale(s, exp2_fast(chunk_factors.element(kDeltaLogDecay, kDeltaChunkRows - 1)));
    const bool has_inverse_lo = prepared.has_inverse_lo();

    // dS^T += (r * dO)^T Q for every query head; the product of the last one overlaps with the wait for Y.
    // All query heads come before the wait for dU, because query heads may outnumber the stages.
    AFragment<Rows / kTileRows> weighted_dout;
    const auto add_queries = [&] { start_queries(s, weighted_dout, space.query(query_pipe.stage), warp); };
    const auto release_queries = [&] {
      wait_state<0>(s);
      keep_registers(weighted_dout);
      arrive_warp(&barriers.query_empty[query_pipe.stage]);
      query_pipe.next(params.stages);
    };
#pragma unroll 1
    for (int member = 1; member < group; ++member) {
      add_queries();
      release_queries();
      wait_for_queries(barriers, query_pipe);
    }
    add_queries();
    wait(&barriers.du_full[du_pipe.stage], du_pipe.phase);
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      if (kHasAllSlabs) load_values(j);
    }
    wgmma_wait<kHasAllSlabs ? 1 : 0>(y);
    rounded.keep();

    // dU_j += w_j Y_j
    add_weighted_rows<T, !kHasAllSlabs>(y, write, values, load_values);
    arrive_warp(&barriers.du_empty[du_pipe.stage]);
    du_pipe.next(kReverseDuStages);
    AFragment<kChunkTiles> du;
    round_to_a_fragment<T>(du, y);

    // G^T = dU^T X
    ChunkAccumulator g;
    start_transposed_solution<T>(g, du, stage.inverse());
    const RowFactorFragment read(chunk_factors, kDeltaReadFactor);
    wgmma_wait<0>(g[0], g[1]);
    keep_registers(du);
    release_queries();
    if (__builtin_expect(has_inverse_lo, false)) {
      add_inverse_lo_transposed<T>(g, du, prepared_at(p.prepared, p.shape, work.first_chunk + c, work.head));
    }

    // dS^T <- dS^T - (read * G)^T K, or B. The output is G, or dv where dv = read * G.
    AFragment<kChunkTiles> rounded_g, update;
    const bool stores_dv = has_dv<T>(p, prepared);
    if (stores_states && !stores_dv) round_to_a_fragment<T>(rounded_g, g);
    scale_chunk_rows(g, [&](int row) { return read.at[row / 8]; });
    round_to_a_fragment<T>(update, g);
    start_update<T, -1>(s, update, space.read_keys(key_pipe.stage));
    if (stores_states) {
      wait(&barriers.update_empty[state_pipe.stage], state_pipe.phase ^ 1);
      store_update(space.update(state_pipe.stage), stores_dv, update, rounded_g, warp);
      arrive_warp(&barriers.update_full[state_pipe.stage]);
      state_pipe.next(params.state_stages);
    }
    uint64_t* const empty_barrier = &barriers.empty[key_pipe.stage];
    key_pipe.next(params.stages);
    // Waiting for the next stage overlaps with the update, if the ring has another stage.
    const bool has_next = c > 0, is_early = has_next && params.stages > 1;
    if (is_early) wait_for_stage();
    wait_state<0>(s);
    keep_registers(update);
    rounded.set(s);
    arrive_warp(empty_barrier);
    if (has_next && !is_early) wait_for_stage();
  }
  store_final_state(s, p.shape, params.grid, work, first_col, p.final);
}

}  // namespace girih::kernels::delta_product

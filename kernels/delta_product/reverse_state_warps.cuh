// The state warps of reverse: one warpgroup with dS^T; warp w has 16 of the 64 columns of the block. As in
// scan_state_warps.cuh the accumulator of a product, rounded, is the A fragment of the next one.
#pragma once

#include "delta_product/reverse_storage.cuh"

namespace girih::kernels::delta_product {

// Starts dS^T += (r * dO)^T Q for the columns of the warp. `weighted_dout`: receives (r * dO)^T.
template <int TokenTiles, typename T, int D, int Rows>
__device__ inline void start_query_update(State<D>& s, AFragment<TokenTiles>& weighted_dout,
                                          const QueryStage<T, D, Rows>& query, int warp) {
#pragma unroll
  for (int t = 0; t < TokenTiles; ++t) {
    load_scaled_transposed<T>(weighted_dout.at[t], query.dout(), 16 * warp, kTileRows * t,
                              query.query_factors() + kTileRows * t);
  }
  fence_state(s);
#pragma unroll
  for (int t = 0; t < TokenTiles; ++t) {
#pragma unroll
    for (int i = 0; i < State<D>::kSlabs; ++i) {
      wgmma_start<T>(s.slab[i], weighted_dout.at[t], query.q(), 64 * i, kTileRows * t);
    }
  }
  wgmma_commit();
}

// G^T += dU^T X with mma of single warps; load(x, i, j) loads block (i, j) of X, transposed.
template <typename T, class Load>
__device__ inline void add_transposed_inverse_product(ChunkAccumulator& g, const AFragment<kChunkTiles>& du,
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

// Starts G^T = dU^T X. X is lower triangular, so columns 32 to 63 of G^T, g[1], have terms from rows 32 to 63
// of X only. The first product of each half clears the half.
template <typename T>
__device__ inline void start_transposed_inverse_product(ChunkAccumulator& g, const AFragment<kChunkTiles>& du,
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
  add_transposed_inverse_product<T>(
      g, du, [&](uint32_t(&block)[4], int i, int j) { x.load_transposed(block, i, j); });
#endif
  wgmma_commit();
}

// G^T += dU^T X_lo, X_lo the rounding errors of X.
template <typename T>
__device__ inline void add_transposed_inverse_lo_product(ChunkAccumulator& g,
                                                         const AFragment<kChunkTiles>& du,
                                                         const unsigned char* prepared) {
  add_transposed_inverse_product<T>(g, du, [&](uint32_t(&x)[4], int i, int j) {
    load_inverse_lo(x, prepared, i, j);
#pragma unroll
    for (int m = 0; m < 4; ++m) x[m] = transpose_pairs(x[m]);
  });
}

// y_j <- du_local_j + w_j y_j, 16 rows j of the chunk (columns of y) at a time. With `LoadsRows`, load(j)
// loads these rows of du_local just before their use.
template <typename T, bool LoadsRows, class Load>
__device__ inline void add_du_local(Accumulator<8>& y, const RowFactorFragment& write_factors,
                                    const ColumnFragments& du_local, const Load& load) {
#pragma unroll
  for (int j = 0; j < kChunkTiles; ++j) {
    if (LoadsRows) load(j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&x)[4] = y.at[2 * j + half];
      const float2 by = write_factors.at[2 * j + half];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 term = unpack_pair<T>(du_local[j][2 * half + i]);
        x[2 * i] = fmaf(by.x, x[2 * i], term.x);
        x[2 * i + 1] = fmaf(by.y, x[2 * i + 1], term.y);
      }
    }
  }
}

// Stores dv or G. (Selecting a reference would place both in local memory.)
template <class Tile>
__device__ inline void store_dz(const Tile& tile, bool stores_dv, const AFragment<kChunkTiles>& dv,
                                const AFragment<kChunkTiles>& g, int warp) {
  if (stores_dv) {
    store_transposed(tile, dv, warp);
  } else {
    store_transposed(tile, g, warp);
  }
}

__device__ inline void wait_for_query_stage(ReverseBarriers& barriers, const PipelineState& query_pipe) {
  barriers.query_factors_full.wait(query_pipe);
  fence_async_proxy();
}

template <typename T, int D, int Rows, bool HasB>
__device__ inline void run_reverse_state_warps(const ReverseParams& params, const BlockWork& work,
                                               const ReverseStorage<T, D, Rows, HasB>& storage, int warp) {
  constexpr bool kHasAllSlabs = RoundedState<T, D>::kHasAllSlabs;
  const DeltaReverse& p = params.problem;
  const int group = p.shape.output_heads / p.shape.heads, first_col = work.col + 16 * warp;
  const bool has_output = !params.grid.is_local;  // stores dS and dz of every chunk
  ReverseBarriers& barriers = storage.barriers();
  State<D> s;  // dS^T
  load_initial_state(s, p.shape, params.grid, work, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.set(s);

  PipelineState key_pipe, query_pipe, state_pipe, du_local_pipe;
  ColumnFragments du_local;
  const auto load_du_local = [&](int j) {
    load_block_transposed(du_local[j], storage.du_local(du_local_pipe.stage), 16 * warp, 16 * j);
  };
  const auto wait_for_stage = [&] {
    barriers.full.wait(key_pipe);
    wait_for_query_stage(barriers, query_pipe);
  };
  if (work.chunks > 0) wait_for_stage();
#pragma unroll 1
  for (int c = work.chunks - 1; c >= 0; --c) {
    const auto stage = storage.stage(key_pipe.stage);
    const Prepared prepared = stage.prepared();
    const ChunkFactors chunk_factors = prepared.chunk_factors();

    // Y = K dS, Y^T = dS^T K^T; with gates dS decays during the product (D = 256: after the product).
    Accumulator<8> y;
    rounded.start_read(y, s, stage.k());
    const RowFactorFragment write_factors(chunk_factors, kDeltaWriteFactor);
    if (has_output) {
      barriers.state_empty.wait(state_pipe);
      rounded.store(s, storage.state(state_pipe.stage), warp);
      barriers.state_full.arrive_warp(state_pipe.stage);
    }
    // Does not wait: only the product Y is in flight. The call tells the compiler that the registers of dS
    // are complete; without the call the compiler would wait for Y before it uses dS.
    wait_state<1>(s);
    if (p.gated) scale(s, exp2_fast(chunk_factors.element(kDeltaLogDecay, kDeltaChunkRows - 1)));
    const bool has_inverse_lo = prepared.has_inverse_lo();

    // dS^T += (r * dO)^T Q for every query head; the product of the last one overlaps with the wait for Y
    // (D = 256: Y is complete).
    // All query heads come before the wait for du_local: the intra-chunk warps need all query heads to
    // complete du_local, and a query stage is free only after the state warps have read it. If query heads
    // outnumber the stages, the opposite order is a deadlock.
    AFragment<Rows / kTileRows> weighted_dout;
    const auto add_query_update = [&] {
      start_query_update(s, weighted_dout, storage.query(query_pipe.stage), warp);
    };
    const auto release_query_stage = [&] {
      wait_state<0>(s);
      keep_registers(weighted_dout);
      barriers.query_empty.arrive_warp(query_pipe.stage);
      query_pipe.next(params.stages);
    };
#pragma unroll 1
    for (int member = 1; member < group; ++member) {
      add_query_update();
      release_query_stage();
      wait_for_query_stage(barriers, query_pipe);
    }
    add_query_update();
    barriers.du_local_full.wait(du_local_pipe);
#pragma unroll
    for (int j = 0; j < kChunkTiles; ++j) {
      if (kHasAllSlabs) load_du_local(j);
    }
    wgmma_wait<kHasAllSlabs ? 1 : 0>(y);
    rounded.keep();

    // dU_j = du_local_j + w_j Y_j
    add_du_local<T, !kHasAllSlabs>(y, write_factors, du_local, load_du_local);
    barriers.du_local_empty.arrive_warp(du_local_pipe.stage);
    du_local_pipe.next(kReverseDuLocalStages);
    AFragment<kChunkTiles> du;
    round_to_a_fragment<T>(du, y);

    // G^T = dU^T X
    ChunkAccumulator g;
    start_transposed_inverse_product<T>(g, du, stage.inverse());
    const RowFactorFragment read_factors(chunk_factors, kDeltaReadFactor);
    wgmma_wait<0>(g[0], g[1]);
    keep_registers(du);
    release_query_stage();
    if (__builtin_expect(has_inverse_lo, false)) {
      add_transposed_inverse_lo_product<T>(g, du,
                                           prepared_at(p.prepared, p.shape, work.first_chunk + c, work.head));
    }

    // dS^T <- dS^T - (read * G)^T K; with b every read_i is 1, and the product is G^T B. If dz holds dv (no
    // gates, no l2norm_qk), dv = beta * G = read * G is the operand `update`.
    AFragment<kChunkTiles> rounded_g, update;
    const bool stores_dv = dz_holds_dv<T>(p, prepared);
    if (has_output && !stores_dv) round_to_a_fragment<T>(rounded_g, g);
    scale_chunk_rows(g, [&](int row) { return read_factors.at[row / 8]; });
    round_to_a_fragment<T>(update, g);
    start_update<T, -1>(s, update, storage.b_or_k(key_pipe.stage));
    if (has_output) {
      barriers.dz_empty.wait(state_pipe);
      store_dz(storage.dz(state_pipe.stage), stores_dv, update, rounded_g, warp);
      barriers.dz_full.arrive_warp(state_pipe.stage);
      state_pipe.next(params.state_stages);
    }
    const int key_stage = key_pipe.stage;
    key_pipe.next(params.stages);
    // Waiting for the next stage overlaps with the update, if the ring has another stage.
    const bool has_next = c > 0, is_early = has_next && params.stages > 1;
    if (is_early) wait_for_stage();
    wait_state<0>(s);
    keep_registers(update);
    rounded.set(s);
    barriers.empty.arrive_warp(key_stage);
    if (has_next && !is_early) wait_for_stage();
  }
  store_final_state(s, p.shape, params.grid, work, first_col, p.final);
}

}  // namespace girih::kernels::delta_product

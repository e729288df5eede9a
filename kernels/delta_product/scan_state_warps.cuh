// The state warps of the scan: one warpgroup; warp w has 16 of the 64 columns of the block.
//
// S^T stays in registers in fp32, and all products are transposed: the accumulator of each product, rounded,
// is the A fragment of the next one, so no intermediate result goes through shared memory. The rounded S and
// U are stored to shared memory for the output warps and the store warp.
#pragma once

#include "delta_product/scan_storage.cuh"

namespace girih::kernels::delta_product {

// z_i -= read_i y_i; the columns are the rows i of the chunk.
__device__ inline void subtract_read(Accumulator<8>& z, const RowFactorFragment& read_factors,
                                     const Accumulator<8>& y) {
  for_each_register<kDeltaChunkRows / 8>([&](int i, int k) {
    z.at[i][k] = fmaf(k % 2 == 0 ? -read_factors.at[i].x : -read_factors.at[i].y, y.at[i][k], z.at[i][k]);
  });
}

// U^T += Z^T X^T with mma of single warps; load(x, i, j) loads block (i, j) of X.
template <typename T, class Load>
__device__ inline void add_inverse_product(ChunkAccumulator& u, const AFragment<kChunkTiles>& z,
                                           const Load& load) {
#pragma unroll
  for (int j = 0; j < kChunkTiles; ++j) {
#pragma unroll
    for (int i = j; i < kChunkTiles; ++i) {
      uint32_t x[4];
      load(x, i, j);
      mma<T>(u[i / 2].at[i % 2 * 2], z.at[j], x[0], x[2]);
      mma<T>(u[i / 2].at[i % 2 * 2 + 1], z.at[j], x[1], x[3]);
    }
  }
}

// U^T += Z^T X_lo^T, X_lo the rounding errors of X.
template <typename T>
__device__ inline void add_inverse_lo_product(ChunkAccumulator& u, const AFragment<kChunkTiles>& z,
                                              const unsigned char* prepared) {
  add_inverse_product<T>(u, z, [&](uint32_t(&x)[4], int i, int j) { load_inverse_lo(x, prepared, i, j); });
}

// Starts U^T = Z^T X^T. X is lower triangular, so columns 0 to 31 of U^T, u[0], have terms from columns 0 to
// 31 of X only. The first product of each half clears the half.
template <typename T>
__device__ inline void start_inverse_product(ChunkAccumulator& u, const AFragment<kChunkTiles>& z,
                                             const InverseTile& x) {
  wgmma_fence();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const auto matrices = [&](int half, int j) {
    return make_descriptor(shared_address(x.data), InverseTile::block(2 * half, j),
                           InverseTile::kColumnStride, 128);
  };
  wgmma_mma<T, Major::k, 32, false>(u[0].at, z.at[0], matrices(0, 0));
  wgmma_mma<T, Major::k, 32, false>(u[1].at, z.at[0], matrices(1, 0));
  wgmma_mma<T, Major::k, 32>(u[0].at, z.at[1], matrices(0, 1));
#pragma unroll
  for (int j = 1; j < kChunkTiles; ++j) wgmma_mma<T, Major::k, 32>(u[1].at, z.at[j], matrices(1, j));
#else
  fill(u[0], 0.f), fill(u[1], 0.f);
  add_inverse_product<T>(u, z, [&](uint32_t(&block)[4], int i, int j) { x.load(block, i, j); });
#endif
  wgmma_commit();
}

template <typename T, int D, int Rows, bool HasB>
__device__ inline void run_state_warps(const ScanParams& params, const BlockWork& work,
                                       const ScanStorage<T, D, Rows, HasB>& storage, int state_group,
                                       int warp) {
  constexpr bool kHasOutput = Rows != kStateOnly;
  const DeltaScan& p = params.problem;
  const int first_col = work.col + 16 * warp;
  const bool has_factors = p.gated || p.shape.unit;  // else every w_j and e^{L_i - L_j} is 1
  ScanBarriers& barriers = storage.barriers();

  State<D> s;  // S^T
  load_initial_state(s, p.shape, params.grid, work, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.set(s);

  PipelineState key_pipe, state_pipe;
  const auto wait_for_stage = [&] {
    if (kHasOutput) {
      barriers.proxy_full.wait(key_pipe);
    } else {
      barriers.full.wait(key_pipe);
      fence_async_proxy();
    }
  };
  if (work.chunks > 0) wait_for_stage();
#pragma unroll 1
  for (int c = 0; c < work.chunks; ++c) {
    const Stage<T, D> stage = storage.stage(key_pipe.stage);
    const Prepared prepared = stage.prepared();
    const ChunkFactors chunk_factors = prepared.chunk_factors();

    // Y^T = S^T K^T, or S^T B^T
    Accumulator<8> y;
    rounded.start_read(y, s, storage.b_or_k(key_pipe.stage), [&](int i, const AFragment<4>& slab) {
      if constexpr (kHasOutput) {
        if (i == 0) barriers.state_empty.wait(state_pipe);
        store_blocks(storage.state(state_pipe.stage), 16 * warp, 64 * i, slab);
      }
    });
    if constexpr (kHasOutput) barriers.state_full.arrive_warp(state_pipe.stage);
    // beta_i v_i and read_i, during the product
    Accumulator<8> beta_v;
    const RowFactorFragment read_factors(chunk_factors, kDeltaReadFactor);
    if (kHasOutput || !work.is_transition) {
      const RowFactorFragment beta(chunk_factors, kDeltaBeta);
#pragma unroll
      for (int j = 0; j < kChunkTiles; ++j) {
        uint32_t values[4];
        load_block_transposed(values, storage.values(key_pipe.stage, state_group), 16 * warp, 16 * j);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 by = beta.at[2 * j + half];
          float(&to)[4] = beta_v.at[2 * j + half];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 value = unpack_pair<T>(values[2 * half + i]);
            to[2 * i] = by.x * value.x, to[2 * i + 1] = by.y * value.y;
          }
        }
      }
    } else {
      fill(beta_v, 0.f);
    }
    pin_registers(beta_v);
    wgmma_wait<0>(y);
    rounded.keep();

    // Z_i = beta_i v_i - read_i Y_i
    subtract_read(beta_v, read_factors, y);
    AFragment<kChunkTiles> z;
    round_to_a_fragment<T>(z, beta_v);

    // U^T = Z^T X^T; S decays during the product
    ChunkAccumulator u;
    start_inverse_product<T>(u, z, stage.inverse());
    const bool has_inverse_lo = prepared.has_inverse_lo();
    if (p.gated) scale(s, exp2_fast(chunk_factors.element(kDeltaLogDecay, kDeltaChunkRows - 1)));
    wgmma_wait<0>(u[0], u[1]);
    keep_registers(z);
    if (__builtin_expect(has_inverse_lo, false)) {
      add_inverse_lo_product<T>(u, z, prepared_at(p.prepared, p.shape, work.first_chunk + c, work.head));
    }

    // S^T <- e^{L_C} S^T + (w * U)^T K
    AFragment<kChunkTiles> unweighted, update;
    round_to_a_fragment<T>(unweighted, u);
    if (has_factors) {
      scale_chunk_rows(u, [&](int row) { return chunk_factors.pair(kDeltaWriteFactor, row); });
      round_to_a_fragment<T>(update, u);
    } else {
      update = unweighted;
    }
    start_update<T>(s, update, stage.k());
    if constexpr (kHasOutput) {
      store_blocks(storage.update(state_pipe.stage), 16 * warp, 0, unweighted);
      barriers.update_full.arrive_warp(state_pipe.stage);
      state_pipe.next(params.state_stages);
    }
    const int key_stage = key_pipe.stage;
    key_pipe.next(params.stages);
    // Waiting for the next stage overlaps with the update, if the ring has another stage.
    const bool has_next = c + 1 < work.chunks, is_early = has_next && params.stages > 1;
    if (is_early) wait_for_stage();
    wait_state<0>(s);
    keep_registers(update);
    rounded.set(s);
    barriers.empty.arrive_warp(key_stage);
    if (has_next && !is_early) wait_for_stage();
  }
  store_final_state(s, p.shape, params.grid, work, first_col, p.final);
  if (!kHasOutput && work.is_transition && p.transitions != nullptr) {
    save_transition(s, p.shape, work, first_col, p.transitions);
  }
}

}  // namespace girih::kernels::delta_product

// The state warps of the scan: one warpgroup; warp w has 16 of the 64 columns of the block.
//
// S^T stays in registers in fp32, and all products are transposed: the accumulator of each product, rounded,
// is the A fragment of the next one, so no intermediate result goes through shared memory. The rounded S and
// U are stored to shared memory for the output warps and the store warp.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

// z_i -= read_i y_i; the columns are the rows i of the chunk.
__device__ inline void take_read(Sums<8>& z, const RowFactors& read, const Sums<8>& y) {
  each_sum<kDeltaRows / 8>([&](int i, int k) {
    z.at[i][k] = fmaf(k % 2 == 0 ? -read.at[i].x : -read.at[i].y, y.at[i][k], z.at[i][k]);
  });
}

// U^T += Z^T X^T with mma of single warps; load(x, i, j) loads block (i, j) of X.
template <typename T, class Load>
__device__ inline void add_solution(Halves& u, const Operand<kTilesDown>& z, const Load& load) {
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
#pragma unroll
    for (int i = j; i < kTilesDown; ++i) {
      uint32_t x[4];
      load(x, i, j);
      mma<T>(u[i / 2].at[i % 2 * 2], z.at[j], x[0], x[2]);
      mma<T>(u[i / 2].at[i % 2 * 2 + 1], z.at[j], x[1], x[3]);
    }
  }
}

// U^T += Z^T E^T, E the rounding errors of X.
template <typename T>
__device__ inline void add_lost_solution(Halves& u, const Operand<kTilesDown>& z,
                                         const unsigned char* prepared) {
  add_solution<T>(u, z, [&](uint32_t(&x)[4], int i, int j) { load_lost(x, prepared, i, j); });
}

// Starts U^T = Z^T X^T, in two halves of 32 columns.
template <typename T>
__device__ inline void start_solution(Halves& u, const Operand<kTilesDown>& z, const InverseRows& x) {
  fence_products();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const auto matrices = [&](int half, int j) {
    return descriptor(shared_address(x.data), InverseRows::block(2 * half, j), InverseRows::kNext, 128);
  };
  group_mma<T, Lines::rows, 32, false>(u[0].at, z.at[0], matrices(0, 0));
  group_mma<T, Lines::rows, 32, false>(u[1].at, z.at[0], matrices(1, 0));
  group_mma<T, Lines::rows, 32>(u[0].at, z.at[1], matrices(0, 1));
#pragma unroll
  for (int j = 1; j < kTilesDown; ++j) group_mma<T, Lines::rows, 32>(u[1].at, z.at[j], matrices(1, j));
#else
  fill(u[0], 0.f), fill(u[1], 0.f);
  add_solution<T>(u, z, [&](uint32_t(&block)[4], int i, int j) { x.load(block, i, j); });
#endif
  commit_products();
}

template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void run_chain(const ScanPass& pass, const Part& part,
                                 const ScanSpace<T, D, Rows, ReadKeys>& space, int chain, int warp) {
  constexpr bool kLeaves = Rows != kAlone;
  const DeltaScan& p = pass.scan;
  const int first_col = part.col + 16 * warp;
  const bool weighted = p.gated || p.shape.unit;  // else every w_j and e^{L_i - L_j} is 1
  ScanBarriers& barriers = space.barriers();

  State<D> s;  // S^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.take(s);

  Turn turn, slot;
  const auto wait_for_stage = [&] {
    if (kLeaves) {
      wait(&barriers.ready[turn.place], turn.parity);
    } else {
      wait(&barriers.full[turn.place], turn.parity);
      fence_tiles();
    }
  };
  if (part.chunks > 0) wait_for_stage();
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const Stage<T, D> stage = space.stage(turn.place);
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();

    // Y^T = S^T K^T, or S^T B^T
    Sums<8> y;
    rounded.start_read(y, s, space.read_keys(turn.place), [&](int i, const Operand<4>& slab) {
      if constexpr (kLeaves) {
        if (i == 0) wait(&barriers.read[slot.place], slot.parity ^ 1);
        store_blocks(space.state(slot.place), 16 * warp, 64 * i, slab);
      }
    });
    if constexpr (kLeaves) arrive_once(&barriers.state[slot.place]);
    // beta_i v_i and read_i, during the product
    Sums<8> given;
    const RowFactors read(vectors, kDeltaRead);
    if (kLeaves || !part.transition) {
      const RowFactors beta(vectors, kDeltaBeta);
#pragma unroll
      for (int j = 0; j < kTilesDown; ++j) {
        uint32_t values[4];
        load_block_transposed(values, space.values(turn.place, chain), 16 * warp, 16 * j);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 by = beta.at[2 * j + half];
          float(&to)[4] = given.at[2 * j + half];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 value = unpaired<T>(values[2 * half + i]);
            to[2 * i] = by.x * value.x, to[2 * i + 1] = by.y * value.y;
          }
        }
      }
    } else {
      fill(given, 0.f);
    }
    pin(given);
    wait_products<0>(y);
    rounded.keep();

    // Z_i = beta_i v_i - read_i Y_i
    take_read(given, read, y);
    Operand<kTilesDown> z;
    round_to<T>(z, given);

    // U^T = Z^T X^T; S decays during the product
    Halves u;
    start_solution<T>(u, z, stage.inverse());
    const bool keeps = prepared.keeps();
    if (p.gated) scale(s, exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1)));
    wait_products<0>(u[0], u[1]);
    keep(z);
    if (__builtin_expect(keeps, false)) {
      add_lost_solution<T>(u, z, prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    }

    // S^T <- e^{L_C} S^T + (w * U)^T K
    Operand<kTilesDown> unweighted, update;
    round_to<T>(unweighted, u);
    if (weighted) {
      scale_chunk_rows(u, [&](int row) { return vectors.pair(kDeltaWrite, row); });
      round_to<T>(update, u);
    } else {
      update = unweighted;
    }
    start_update<T>(s, update, stage.k());
    if constexpr (kLeaves) {
      store_blocks(space.update(slot.place), 16 * warp, 0, unweighted);
      arrive_once(&barriers.update[slot.place]);
      slot.next(pass.slots);
    }
    uint64_t* const emptied = &barriers.empty[turn.place];
    turn.next(pass.stages);
    // Waiting for the next stage overlaps with the update, if the ring has another stage.
    const bool more = c + 1 < part.chunks, early = more && pass.stages > 1;
    if (early) wait_for_stage();
    finish<0>(s);
    keep(update);
    rounded.take(s);
    arrive_once(emptied);
    if (more && !early) wait_for_stage();
  }
  end_state(s, p.shape, pass.walk, part, first_col, p.final);
  if (!kLeaves && part.transition && p.transitions != nullptr) {
    keep_transition(s, p.shape, part, first_col, p.transitions);
  }
}

}  // namespace girih::kernels::delta_product

// The state warps of reverse: one warpgroup with dS^T; warp w has 16 of the 64 columns of the block. As in
// scan_chain.cuh the accumulator of a product, rounded, is the A fragment of the next one.
#pragma once

#include "delta_product/reverse_space.cuh"

namespace girih::kernels::delta_product {

// Starts S^T += a Q with a = (r * dO)^T, the columns of the warp.
template <int Bands, typename T, int D, int Rows>
__device__ inline void start_queries(State<D>& s, Operand<Bands>& a, const GradientStage<T, D, Rows>& query,
                                     int warp) {
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
    load_weighed_transposed<T>(a.at[b], query.dout(), 16 * warp, kTileRows * b, query.read() + kTileRows * b);
  }
  begin(s);
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
#pragma unroll
    for (int i = 0; i < State<D>::kSlabs; ++i) {
      start_product<T>(s.slab[i], a.at[b], query.q(), 64 * i, kTileRows * b);
    }
  }
  commit_products();
}

// G^T += dU^T X with mma of single warps; load(x, i, j) loads block (i, j) of X, transposed.
template <typename T, class Load>
__device__ inline void add_transposed_solution(Halves& g, const Operand<kTilesDown>& du, const Load& load) {
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
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
__device__ inline void start_transposed_solution(Halves& g, const Operand<kTilesDown>& du,
                                                 const InverseRows& x) {
  fence_products();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const auto matrices = [&](int i, int half) {
    return descriptor(shared_address(x.data), InverseRows::block(i, 2 * half), 128, InverseRows::kNext);
  };
  group_mma<T, Lines::columns, 32, false>(g[0].at, du.at[0], matrices(0, 0));
  group_mma<T, Lines::columns, 32, false>(g[1].at, du.at[2], matrices(2, 1));
  group_mma<T, Lines::columns, 32>(g[1].at, du.at[3], matrices(3, 1));
#pragma unroll
  for (int i = 1; i < kTilesDown; ++i) group_mma<T, Lines::columns, 32>(g[0].at, du.at[i], matrices(i, 0));
#else
  fill(g[0], 0.f), fill(g[1], 0.f);
  add_transposed_solution<T>(g, du,
                             [&](uint32_t(&block)[4], int i, int j) { x.load_transposed(block, i, j); });
#endif
  commit_products();
}

// G^T += dU^T E, E the rounding errors of X.
template <typename T>
__device__ inline void add_lost_transposed(Halves& g, const Operand<kTilesDown>& du,
                                           const unsigned char* prepared) {
  add_transposed_solution<T>(g, du, [&](uint32_t(&x)[4], int i, int j) {
    load_lost(x, prepared, i, j);
#pragma unroll
    for (int m = 0; m < 4; ++m) x[m] = transpose_pairs(x[m]);
  });
}

// y_j <- values_j + w_j y_j, 16 rows j at a time. If `Late`, load(j) loads values_j here.
template <typename T, bool Late, class Load>
__device__ inline void add_written(Sums<8>& y, const RowFactors& write, const ColumnBlocks& values,
                                   const Load& load) {
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
    if (Late) load(j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&of)[4] = y.at[2 * j + half];
      const float2 by = write.at[2 * j + half];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 value = unpaired<T>(values[j][2 * half + i]);
        of[2 * i] = fmaf(by.x, of[2 * i], value.x);
        of[2 * i + 1] = fmaf(by.y, of[2 * i + 1], value.y);
      }
    }
  }
}

// Stores dv or G. (Selecting a reference would place both in local memory.)
template <class Tile>
__device__ inline void leave_update(const Tile& slot, bool same, const Operand<kTilesDown>& dv,
                                    const Operand<kTilesDown>& g, int warp) {
  if (same) {
    leave_transposed(slot, dv, warp);
  } else {
    leave_transposed(slot, g, warp);
  }
}

__device__ inline void wait_for_queries(ReverseBarriers& barriers, const Turn& turn) {
  wait(&barriers.query_ready[turn.place], turn.parity);
  fence_tiles();
}

template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void run_reverse_chain(const ReversePass& pass, const Part& part,
                                         const ReverseSpace<T, D, Rows, ReadKeys>& space, int warp) {
  constexpr bool kWhole = RoundedState<T, D>::kWhole;
  const DeltaReverse& p = pass.scan;
  const int group = p.shape.query_heads / p.shape.heads, first_col = part.col + 16 * warp;
  const bool stores = !pass.walk.alone;
  ReverseBarriers& barriers = space.barriers();
  State<D> s;  // dS^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.take(s);

  Turn turn, query_turn, slot, made;
  ColumnBlocks values;
  const auto load_values = [&](int j) {
    load_block_transposed(values[j], space.made(made.place), 16 * warp, 16 * j);
  };
  const auto wait_for_stage = [&] {
    wait(&barriers.full[turn.place], turn.parity);
    wait_for_queries(barriers, query_turn);
  };
  if (part.chunks > 0) wait_for_stage();
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    const auto stage = space.stage(turn.place);
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();

    // Y^T = dS^T K^T; with gates dS decays during the product.
    Sums<8> y;
    rounded.start_read(y, s, stage.k());
    const RowFactors write(vectors, kDeltaWrite);
    if (stores) {
      wait(&barriers.state_stored[slot.place], slot.parity ^ 1);
      rounded.leave(s, space.state(slot.place), warp);
      arrive_once(&barriers.state[slot.place]);
    }
    // The products of S are complete. Without this wait the compiler would wait for Y before it uses S.
    finish<1>(s);
    if (p.gated) scale(s, exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1)));
    const bool keeps = prepared.keeps();

    // dS^T += (r * dO)^T Q for every query head; the product of the last one overlaps with the wait for Y.
    // All query heads come before the wait for dU, because query heads may outnumber the stages.
    Operand<Rows / kTileRows> read_by;
    const auto add_queries = [&] { start_queries(s, read_by, space.query(query_turn.place), warp); };
    const auto leave_queries = [&] {
      finish<0>(s);
      keep(read_by);
      arrive_once(&barriers.query_empty[query_turn.place]);
      query_turn.next(pass.stages);
    };
#pragma unroll 1
    for (int member = 1; member < group; ++member) {
      add_queries();
      leave_queries();
      wait_for_queries(barriers, query_turn);
    }
    add_queries();
    wait(&barriers.made[made.place], made.parity);
#pragma unroll
    for (int j = 0; j < kTilesDown; ++j) {
      if (kWhole) load_values(j);
    }
    wait_products<kWhole ? 1 : 0>(y);
    rounded.keep();

    // dU_j += w_j Y_j
    add_written<T, !kWhole>(y, write, values, load_values);
    arrive_once(&barriers.used[made.place]);
    made.next(kReverseMade);
    Operand<kTilesDown> du;
    round_to<T>(du, y);

    // G^T = dU^T X
    Halves g;
    start_transposed_solution<T>(g, du, stage.inverse());
    const RowFactors read(vectors, kDeltaRead);
    wait_products<0>(g[0], g[1]);
    keep(du);
    leave_queries();
    if (__builtin_expect(keeps, false)) {
      add_lost_transposed<T>(g, du, prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    }

    // dS^T <- dS^T - (read * G)^T K, or B. The output is G, or dv where dv = read * G.
    Operand<kTilesDown> left, update;
    const bool same = divides<T>(p, prepared);
    if (stores && !same) round_to<T>(left, g);
    scale_chunk_rows(g, [&](int row) { return read.at[row / 8]; });
    round_to<T>(update, g);
    start_update<T, -1>(s, update, space.read_keys(turn.place));
    if (stores) {
      wait(&barriers.update_stored[slot.place], slot.parity ^ 1);
      leave_update(space.update(slot.place), same, update, left, warp);
      arrive_once(&barriers.update[slot.place]);
      slot.next(pass.slots);
    }
    uint64_t* const emptied = &barriers.empty[turn.place];
    turn.next(pass.stages);
    // Waiting for the next stage overlaps with the update, if the ring has another stage.
    const bool more = c > 0, early = more && pass.stages > 1;
    if (early) wait_for_stage();
    finish<0>(s);
    keep(update);
    rounded.take(s);
    arrive_once(emptied);
    if (more && !early) wait_for_stage();
  }
  end_state(s, p.shape, pass.walk, part, first_col, p.final);
}

}  // namespace girih::kernels::delta_product

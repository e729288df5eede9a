// The chain of a scan that makes the output too (scan_output.cuh).
#pragma once

#include "delta_product/output_space.cuh"
#include "delta_product/scan_chain.cuh"

namespace girih::kernels::delta_product {

// sums = S^T x^T, or with `Add` sums += Sign S^T x^T; under way afterwards.
template <bool Add, int Sign, typename T, int D, int N, int Rows>
__device__ inline void start_read(Sums<N>& sums, const RoundedState<T, D>& s,
                                  const BlockTile<T, D, Rows>& x) {
  static_assert(RoundedState<T, D>::kWhole);
  start_product_transposed<T, Add, Sign>(sums, s.slab[0], x, 0);
#pragma unroll
  for (int i = 1; i < State<D>::kSlabs; ++i) {
    start_product_transposed<T, true, Sign>(sums, s.slab[i], x, 64 * i);
  }
  commit_products();
}

// z = v, the warp's columns.
template <typename T>
__device__ inline void take_values(Sums<8>& z, const Values<T>& v, int warp) {
  ColumnBlocks values;
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) load_block_transposed(values[j], v, 16 * warp, 16 * j);
  widen<T>(z, values);
}

// o_t *= r_t, or the scale where that is all of it.
template <bool Weighted, int N>
__device__ inline void scale_output(Sums<N>& o, const float* far, float scale) {
  if constexpr (Weighted) {
    scale_columns(o, [&](int i) { return *reinterpret_cast<const float2*>(far + 8 * i + lane_col()); });
  } else {
    scale_columns(o, [&](int) { return float2{scale, scale}; });
  }
}

// The chain, as in scan_chain.cuh. Weighted: not every rho is 1 and every L 0.
template <bool Weighted, typename T, int D, int Rows>
__device__ inline void run_output_chain(const ScanPass& pass, const Part& part,
                                        const OutputSpace<T, D, Rows>& space, int warp) {
  constexpr int kEights = Rows / 8;
  const DeltaScan& p = pass.scan;
  const int first_col = part.col + 16 * warp;
  const bool leaves = p.states != nullptr;
  OutputBarriers& barriers = space.barriers();

  State<D> s;  // S^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.take(s);
  Sums<8> z;                    // v
  Operand<kEights / 2> output;  // of the chunk before

  Turn turn, place, slot;
  // Where the queries were: no warp reads them any more, for a product is the whole warpgroup's, and this
  // warp has waited for it.
  const auto leave_output = [&](int at) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    barrier_wait(1 + OutputRoles::kMakers, 32 * OutputRoles::kChain);  // each warp has products of its own
#endif
    leave_transposed(space.output(at), output, warp);
    arrive_once(&barriers.output[at]);
  };
  if (part.chunks > 0) {
    wait(&barriers.made[0], 0);
    take_values(z, space.stage(turn.place).v(), warp);
  }
  int before = 0;  // the place of the chunk before
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const Stage<T, D> stage = space.stage(turn.place);
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();

    // Loads are started before products, whose time they take.
    const bool keeps = prepared.keeps();
    const float log_end = Weighted ? vectors.element(kDeltaLog, kDeltaRows - 1) : 0.f;
    const bool mild = is_mild<T>(keeps, log_end);
    const RowFactors read = Weighted ? RowFactors(vectors, kDeltaRead) : RowFactors();

    // Y^T = S^T K^T, or at once v^T - Y^T; and S^T Q^T
    Sums<8> y;
    fence_products(z);
    if constexpr (Weighted) {
      start_read<false, 1>(y, rounded, stage.k());
    } else {
      start_read<true, -1>(z, rounded, stage.k());
    }
    Sums<kEights> o;
    start_read<false, 1>(o, rounded, space.query(place.place));
    if (leaves) {
      wait(&barriers.read[slot.place], slot.parity ^ 1);
      rounded.leave(s, space.state(slot.place), warp);
      arrive_once(&barriers.state[slot.place]);
      slot.next(pass.slots);
    }
    // Z_i = v_i - r_i Y_i (the makers have left r where beta r was), or where X has no beta in it beta_i
    // times that
    if constexpr (Weighted) {
      wait_products<1>(y);
      take_read(z, read, y);
    } else {
      wait_products<1>(z);
    }
    if (__builtin_expect(keeps, false)) {
      scale_columns(z, [&](int i) { return vectors.pair(kDeltaBeta, 8 * i); });
    }
    Operand<kTilesDown> rounded_z;
    round_to<T>(rounded_z, z);

    // U^T = Z^T Xb^T; S decays meanwhile
    Halves u;
    start_solution<T>(u, rounded_z, stage.inverse());
    if (c > 0) leave_output(before);
    if (Weighted) scale(s, exp2_fast(log_end));
    wait_products<0>(u[0], u[1]);
    keep(rounded_z);
    rounded.keep();
    if (__builtin_expect(keeps, false)) {
      add_lost_solution<T>(u, rounded_z, prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    }

    // S^T <- e^{L_C} S^T + (w * U)^T K
    Operand<kTilesDown> solution, update;  // U, w U; of a mild chunk both are w U, as X makes it
    round_to<T>(solution, u);
    update = solution;
    if (Weighted && __builtin_expect(!mild, false)) {
      scale_chunk_rows(u, [&](int row) { return vectors.pair(kDeltaWrite, row); });
      round_to<T>(update, u);
    }
    start_update<T>(s, update, stage.k());

    // The next values, meanwhile; and o^T += U^T P^T
    uint64_t* const emptied = &barriers.empty[turn.place];
    before = place.place;
    turn.next(pass.stages), place.next(pass.places);
    if (c + 1 < part.chunks) {
      wait(&barriers.made[place.place], place.parity);
      take_values(z, space.stage(turn.place).v(), warp);
    }
    pin(o);
    scale_output<Weighted>(o, space.far(before), p.shape.scale);
    fence_products(o);
    start_product<T>(o, solution, space.near(before));
    commit_products();
    finish<1>(s);
    keep(update);
    rounded.take(s);
    wait_products<0>(o);
    keep(solution);
    arrive_once(emptied);
    round_to<T>(output, o);
  }
  if (part.chunks > 0) leave_output(before);
  end_state(s, p.shape, pass.walk, part, first_col, p.final);
}

}  // namespace girih::kernels::delta_product

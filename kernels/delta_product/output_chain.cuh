// The state warps of scan_output, which compute the output too.
#pragma once

#include "delta_product/output_space.cuh"
#include "delta_product/scan_chain.cuh"

namespace girih::kernels::delta_product {

// Starts sums = S^T x^T, or with `Add` sums += Sign S^T x^T.
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

// Loads the columns of v of the warp.
template <typename T, int Cols>
__device__ inline void take_values(ColumnBlocks& values, const BlockTile<T, Cols>& v, int warp) {
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) load_block_transposed(values[j], v, 16 * warp, 16 * j);
}

// o_t *= r_t, or o_t *= scale without factors.
template <bool Weighted, int N>
__device__ inline void scale_output(Sums<N>& o, const float* far, float scale) {
  if constexpr (Weighted) {
    scale_columns(o, [&](int i) { return *reinterpret_cast<const float2*>(far + 8 * i + lane_col()); });
  } else {
    scale_columns(o, [&](int) { return float2{scale, scale}; });
  }
}

// As run_chain() of scan_chain.cuh, with the output. Weighted: some rho differs from 1 or some L from 0.
template <bool Weighted, typename T, int D, int Rows, int Chains>
__device__ inline void run_output_chain(const ScanPass& pass, const Part& part,
                                        const OutputSpace<T, D, Rows, Chains>& space, int warp) {
  constexpr int kEights = Rows / 8;
  const DeltaScan& p = pass.scan;
  const int first_col = part.col + 16 * warp;
  const bool leaves = p.states != nullptr;
  OutputBarriers& barriers = space.barriers();

  State<D> s;  // S^T
  start_state(s, p.shape, pass.walk, part, first_col, p.initial);
  RoundedState<T, D> rounded;
  rounded.take(s);
  ColumnBlocks values;          // v
  Operand<kEights / 2> output;  // of the previous chunk

  Turn turn, place, slot, before;  // before: place of the previous chunk
  // Stores the output to the memory of the queries. With one state warpgroup no warp still reads the queries,
  // because a product is collective and this warp has waited for it. With two, the other warpgroup may still
  // read them.
  const auto leave_output = [&] {
    if constexpr (Chains == 2) {
      wait(&barriers.used[before.place], before.parity);
    } else {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
      barrier_wait(1 + OutputRoles<1>::kMakers, 32 * OutputRoles<1>::kChain);  // mma.sync is per warp
#endif
    }
    leave_transposed(space.output(before.place), output, warp);
    arrive_once(&barriers.output[before.place]);
  };
  const auto next_values = [&] {
    wait(&barriers.made[place.place], place.parity);
    take_values(values, space.values(turn.place), warp);
  };
  if (part.chunks > 0) next_values();
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    const auto stage = space.stage(turn.place);
    const Prepared prepared = stage.prepared();
    const Vectors vectors = prepared.vectors();

    // Loads are issued ahead of the products that hide their latency.
    const bool keeps = prepared.keeps();
    const float log_end = Weighted ? vectors.element(kDeltaLog, kDeltaRows - 1) : 0.f;
    const bool mild = is_mild<T>(keeps, log_end);
    const RowFactors read = Weighted && Chains == 1 ? RowFactors(vectors, kDeltaRead) : RowFactors();

    // Y^T = S^T K^T, or directly v^T - Y^T; and S^T Q^T, with two state warpgroups later because registers
    // are scarce.
    Sums<8> y, z;
    if constexpr (Weighted) {
      fence_products();
      start_read<false, 1>(y, rounded, stage.k());
    } else {
      widen<T>(z, values);
      fence_products(z);
      start_read<true, -1>(z, rounded, stage.k());
    }
    Sums<kEights> o;
    if constexpr (Chains == 1) start_read<false, 1>(o, rounded, space.query(place.place));
    if (c > 0) leave_output();
    if (leaves) {
      wait(&barriers.read[slot.place], slot.parity ^ 1);
      rounded.leave(s, space.state(slot.place), warp);
      arrive_once(&barriers.state[slot.place]);
      slot.next(pass.slots);
    }
    // Z_i = v_i - r_i Y_i (the producer warps have replaced beta r by r). If `keeps`, X does not contain
    // beta, and Z_i is multiplied by beta_i.
    if constexpr (Weighted) {
      widen<T>(z, values);
      wait_products<2 - Chains>(y);
      take_read(z, Chains == 2 ? RowFactors(vectors, kDeltaRead) : read, y);
    } else {
      wait_products<2 - Chains>(z);
    }
    if (__builtin_expect(keeps, false)) {
      scale_columns(z, [&](int i) { return vectors.pair(kDeltaBeta, 8 * i); });
    }
    Operand<kTilesDown> rounded_z;
    round_to<T>(rounded_z, z);

    // U^T = Z^T Xb^T; S decays during the product
    Halves u;
    start_solution<T>(u, rounded_z, stage.inverse());
    if constexpr (Chains == 2) start_read<false, 1>(o, rounded, space.query(place.place));
    if (Weighted) scale(s, exp2_fast(log_end));
    wait_products<Chains - 1>(u[0], u[1]);
    keep(rounded_z);
    if constexpr (Chains == 1) rounded.keep();
    if (__builtin_expect(keeps, false)) {
      add_lost_solution<T>(u, rounded_z, prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    }

    // S^T <- e^{L_C} S^T + (w * U)^T K; if `mild`, X yields w U
    const bool weighs = Weighted && !mild;
    Operand<kTilesDown> solution;
    if (__builtin_expect(weighs, false)) {
      Halves weighted = {u[0], u[1]};
      scale_chunk_rows(weighted, [&](int row) { return vectors.pair(kDeltaWrite, row); });
      round_to<T>(solution, weighted);
    } else {
      round_to<T>(solution, u);
    }
    start_update<T>(s, solution, stage.k());

    // Loads the next values during the update; then o^T += U^T P^T.
    uint64_t* const emptied = &barriers.empty[turn.place];
    before = place;
    turn.next(pass.stages), place.next(pass.places);
    if (c + 1 < part.chunks) next_values();
    if constexpr (Chains == 2) {
      wait_products<1>(o);
      rounded.keep();
      arrive_once(&barriers.used[before.place]);
    } else {
      pin(o);
    }
    if (__builtin_expect(weighs, false)) {
      finish<0>(s);
      keep(solution);
      round_to<T>(solution, u);
    }
    scale_output<Weighted>(o, space.far(before.place), p.shape.scale);
    fence_products(o);
    start_product<T>(o, solution, space.near(before.place));
    commit_products();
    finish<1>(s);
    rounded.take(s);
    wait_products<0>(o);
    keep(solution);
    arrive_once(emptied);
    round_to<T>(output, o);
  }
  if (part.chunks > 0) leave_output();
  end_state(s, p.shape, pass.walk, part, first_col, p.final);
}

}  // namespace girih::kernels::delta_product

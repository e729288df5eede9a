// The output warps of head_read_kernel: warpgroups that compute o. They process chunks round-robin.
#pragma once

#include "gla/head_block.cuh"

namespace girih::kernels {

// o_i = r_i q_i S + sum_j near_ij v_j,   near_ij = scale (q_i . k_j) e^{-|L_i - L_j|},   r = scale e^L, in
// reverse r = e^{L_C - L}
template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::read() const {
  const int reader = (warp - kFirstKeeper - kKeepers<D>) / 4, row_block = warp % 4;
  if (alone || reader >= pass.readers) return;
  // A warpgroup that skips chunks cannot miss a phase of a barrier: the S of its own chunk comes after all
  // previous phases.
  constexpr bool kHolds = kHoldsQueries<D>;
  Turn at, of_values, from;
  at.skip(reader, pass.stages), of_values.skip(reader, pass.values), from.skip(reader, pass.slots);
#pragma unroll 1
  for (int turn = reader; turn < walk.chunks; turn += pass.readers) {
    const Stage stage = stage_at(at.place);
    const State carried = state_at(from.place);
    const float* sums = ring.sums[of_values.place];
    const int token = walk.token_of(turn);

    Sums<8> scores, o;
    fill(scores, 0.f);
    fill(o, 0.f);
    wait(&ring.full[of_values.place], of_values.parity);
    Operand<kHolds ? D / 16 : 1> q;
    if constexpr (kHolds) {
      load_blocks(q, stage.q, kRows * row_block);
    }
    fence_tiles();
    fence_products(scores);
    if constexpr (kHolds) {
      start_product_transposed<T>(scores, q, stage.k);
    } else {
      start_product_transposed(scores, stage.q, stage.k);
    }
    commit_products();
    wait(&ring.carried[from.place], from.parity);
    fence_products(o);
    if constexpr (kHolds) {
      start_product_transposed<T>(o, q, carried);
    } else {
      start_product_transposed(o, stage.q, carried);
    }
    commit_products();
    wait_products<1>(scores);
    if (kHolds) arrive(&ring.stage_free[at.place]);
    decay_scores(scores, sums, shape.scale, row_block, Reverse);
    Operand<4> near;
    round_to<T>(near, scores);
    wait_products<0>(o);
    if constexpr (kHolds) keep(q);
    arrive(&ring.used[from.place]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sums[kRows * row_block + lane_row() + 8 * i];
      const float r = Reverse ? exp2_fast(sums[kChunk - 1] - sum) : shape.scale * exp2_fast(sum);
#pragma unroll
      for (int n = 0; n < 8; ++n) o.at[n][2 * i] *= r, o.at[n][2 * i + 1] *= r;
    }
    fence_products(o);
    start_product<T>(o, near, values_at(of_values.place));
    commit_products();
    wait_products<0>(o);
    keep(near);

    arrive(&ring.values_free[of_values.place]);

    // Without a buffer of their own, the stores use the tile of q, which all four warps have read.
    if (!kHolds) barrier_wait(1, 128);
    const SharedTile<T, kChunk, kSlab> out = kHolds ? out_at(reader).block(0) : stage.q.block(0);
    const Piece piece{walk.sequence, 0, walk.start + token, walk.rows_from(token)};
    store_rows_of<T>(o, out, row_block, p.o, piece, query_head, col, shape.V);
    if (!kHolds) arrive(&ring.stage_free[at.place]);
    at.skip(pass.readers, pass.stages), of_values.skip(pass.readers, pass.values);
    from.skip(pass.readers, pass.slots);
  }
}

}  // namespace girih::kernels

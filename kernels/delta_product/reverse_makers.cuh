// The producer warps of reverse: the terms of dU that do not depend on dS, ahead of the state warps.
#pragma once

#include "delta_product/reverse_space.cuh"
#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

// sum_t P_tj do_t of every chunk; warp w has rows 16 w to 16 w + 15. Also stores scale rho_t to global memory
// for gradients.
template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void make_given(const ReversePass& pass, const Part& part,
                                  const ReverseSpace<T, D, Rows, ReadKeys>& space, int warp) {
  constexpr int kEights = Rows / 8;
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, group = p.shape.query_heads / p.shape.heads;
  const bool tells = !pass.walk.alone && part.col == 0;
  ReverseBarriers& barriers = space.barriers();
  Turn turn, query_turn, made;
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    Sums<8> du;
    fill(du, 0.f);
    wait(&barriers.full[turn.place], turn.parity);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const ReverseSpace<T, D, Rows, ReadKeys> here{space.data + worked_out_here(0), space.stages,
                                                    space.slots};
      const auto stage = here.stage(turn.place);
      const Vectors vectors = stage.prepared().vectors();
      const auto query = here.query(query_turn.place);
      wait(&barriers.query_full[query_turn.place], query_turn.parity);
      fence_tiles();

      // K Q^T
      Sums<kEights> scores;
      fence_products();
      start_product_transposed<false>(scores, stage.k(), query.q());
      commit_products();
      float* const factors = p.factors + ((part.chunk + c) * p.shape.query_heads +
                                          static_cast<int64_t>(part.head) * group + member) *
                                             kDeltaRows;
      for_each_token(query.q(), p.shape, vectors, warp, [&](int token, float factor, float log) {
        query.tokens()[token] = {factor, log};
        query.read()[token] = factor * exp2_fast(log);
        if (!tells) return;
        factors[token] = factor;
        if (Rows < kDeltaRows) factors[Rows + token] = p.shape.scale;  // rows without a token
      });
      barrier_wait(1, 32 * kReverseMakers);
      arrive_once(&barriers.query_ready[query_turn.place]);
      wait_products<0>(scores);

      // dU += P^T dO
      weigh_transposed(scores, vectors, worked_out_here(n), warp, query.tokens());
      Operand<kEights / 2> weights;
      round_to<T>(weights, scores);
      fence_products(du);
      start_product<T>(du, weights, query.dout());
      commit_products();
      wait_products<0>(du);
      keep(weights);
      arrive_once(&barriers.query_empty[query_turn.place]);
      query_turn.next(pass.stages);
    }
    Operand<kTilesDown> rounded;
    round_to<T>(rounded, du);
    wait(&barriers.used[made.place], made.parity ^ 1);
    store_blocks(space.made(made.place), kTileRows * warp, 0, rounded);
    arrive_once(&barriers.made[made.place]);
    made.next(kReverseMade);
    turn.next(pass.stages);
  }
}

}  // namespace girih::kernels::delta_product

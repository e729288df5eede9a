// The output warps of the scan for several steps a token (tiles of 32 tokens). Chunks are assigned to
// warpgroups round-robin:
//
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//
// All products are transposed, like those of the state warps: the 64 rows of a product are rows of the chunk
// or columns of V, and its columns are the tokens. With tokens as rows, half of every product was wasted and
// the state warps waited. All factors come from shared memory. The scores do not depend on the state warps.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

template <bool Apart, typename T, int D, int Rows, bool ReadKeys>
__device__ inline void run_half_readers(const ScanPass& pass, const Part& part,
                                        const ScanSpace<T, D, Rows, ReadKeys>& space, int reader, int warp) {
  if (reader >= pass.readers || reader >= part.chunks) return;
  constexpr int kEights = Rows / 8;  // groups of 8 tokens
  const DeltaScan& p = pass.scan;
  using Space = ScanSpace<T, D, Rows, ReadKeys>;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads,
            cols = p.shape.V - part.col;
  const bool weighted = p.gated || p.shape.unit;  // else every factor but the scale is 1
  ScanBarriers& barriers = space.barriers();
  const auto together = [&] { barrier_wait(1 + reader, 128); };
  Turn turn, slot;
  if (reader > 0) turn.skip(reader, pass.stages), slot.skip(reader, pass.slots);
  // Phases of barriers as in run_readers().

  const TileCopier<128, typename Space::HalfReader::Query> queries(
      at<T>(p.q, part.piece.sequence.batch, part.piece.start,
            static_cast<int64_t>(part.head) * group / p.shape.query_share, 0),
      p.q.stride[1], p.shape.D, 32 * warp + lane());
  const auto fetch = [&](int chunk, int member) {
    if (chunk < part.chunks) {
      queries.start(space.half_reader(reader).q, chunk * tokens, tokens_in(part, tokens, chunk),
                    member * p.q.stride[2]);
    }
    commit_copies();
  };
  fetch(reader, 0);
#pragma unroll 1
  for (int c = reader; c < part.chunks; c += pass.readers) {
    wait(&barriers.ready[turn.place], turn.parity);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const bool last = member + 1 == group;
      const Space here{space.data + worked_out_here(0), space.stages, space.slots, space.readers};
      const typename Space::HalfReader own = here.half_reader(reader);
      const Stage<T, D> stage = here.stage(turn.place);
      const Vectors vectors = stage.prepared().vectors();
      wait_copies<0>();
      fence_tiles();
      together();

      // K Q^T, and S^T Q^T
      Sums<kEights> scores, o;
      fence_products();
      start_product_transposed<false>(scores, stage.k(), own.q);
      commit_products();
      if (member == 0) {
        wait(&barriers.state[slot.place], slot.parity);
        fence_tiles();
      }
      fence_products();
      start_product_transposed<false>(o, here.state(slot.place), own.q);
      commit_products();

      if (weighted) {
        for_each_token(own.q, p.shape, vectors, warp, [&](int token, float factor, float log) {
          own.tokens[token] = {factor, log};
        });
        together();
      }
      wait_products<1>(scores);
      if (weighted) {
        weigh_transposed(scores, vectors, worked_out_here(n), warp, own.tokens);
      } else {
        scale_transposed(scores, worked_out_here(n), warp, p.shape.scale);
      }
      if (last) arrive_once(&barriers.empty[turn.place]);
      Operand<kEights / 2> near;
      round_to<T>(near, scores);
      store_blocks(own.near, kTileRows * warp, 0, near);
      fence_tiles();
      wait_products<0>(o);
      together();  // all warps have read q and stored P
      last ? fetch(c + pass.readers, 0) : fetch(c, member + 1);
      if (weighted) {
        scale_columns(o, [&](int i) {
          const float4 two = *reinterpret_cast<const float4*>(own.tokens + 8 * i + lane_col());
          return float2{two.x * exp2_fast(two.y), two.z * exp2_fast(two.w)};
        });
      } else {
        scale_columns(o, [&](int) { return float2{p.shape.scale, p.shape.scale}; });
      }

      // o^T += U^T P^T
      if (member == 0) {
        wait(&barriers.update[slot.place], slot.parity);
        fence_tiles();
      }
      fence_products(o);
      start_product<T>(o, here.update(slot.place), 0, own.near);
      commit_products();
      wait_products<0>(o);
      if (last) leave_slot<Apart>(barriers.read[slot.place]);
      Operand<kEights / 2> rounded;
      round_to<T>(rounded, o);
      leave_transposed(own.out, rounded, warp);
      together();
      T* const to = at<T>(p.o, part.piece.sequence.batch, part.piece.start + c * tokens,
                          static_cast<int64_t>(part.head) * group + member, part.col);
      store_rows<4>(own.out, to, p.o.stride[1], tokens_in(part, tokens, c), cols, warp);
    }
    turn.skip(pass.readers, pass.stages), slot.skip(pass.readers, pass.slots);
  }
}

}  // namespace girih::kernels::delta_product

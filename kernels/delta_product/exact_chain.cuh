// The state warps of the fp32 scan. A group of two warps has sixteen columns of V; each warp has half of D,
// and the two warps add their partial products with the state.
#pragma once

#include "delta_product/exact_state.cuh"

namespace girih::kernels::delta_product::by_tile {

// Adds the partial sums over D of the two warps of a group.
struct Exchanger {
  Exchange& space;
  const int group, part;
  int turn = 0;

  __device__ void give(int which, const TileRows& x) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      space.of_lane[turn][part][2 * which + n][lane()] = {x.at[n][0], x.at[n][1], x.at[n][2], x.at[n][3]};
    }
  }
  // Barrier: both warps have stored their sums, and have read those of the previous exchange.
  __device__ void meet() const { barrier_wait(1 + group, 32 * kParts); }
  __device__ void add(int which, TileRows& x) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 y = space.of_lane[turn][1 - part][2 * which + n][lane()];
      x.at[n][0] += y.x, x.at[n][1] += y.y, x.at[n][2] += y.z, x.at[n][3] += y.w;
    }
  }
};

// Forward, visit of a tile by one query head: z = w - e^L S^T b, u = X z for the first head; o = scale e^L
// S^T q + P u; S <- e^{L_C} S + k (e^{L_C - L} u) for the last head. The first warp of the group stores u,
// the second computes o.
template <int Tile>
__device__ inline void run_forward(ChainState<Tile>& state, const TileSpace<Tile>& space,
                                   Exchanger& exchange) {
  const DeltaExactScan& p = state.p;
  const DeltaExactShape& shape = state.shape;
  const Walked& here = state.here;
  TileBarriers& barriers = space.barriers();
  const bool makes_o = state.part == 1;
  const int64_t batch = here.sequence.batch, start = here.sequence.start;
  float* const o = at<float>(p.o, batch, start, here.head * here.group, state.col);
  float* const u =
      p.u.data == nullptr ? nullptr : at<float>(p.u, batch, start * shape.n, here.head, state.col);
  // 32-bit offsets from the start of the segment; addresses are recomputed at each store.
  const int u_stride = static_cast<int>(p.u.stride[1]), o_stride = static_cast<int>(p.o.stride[1]),
            o_member = static_cast<int>(p.o.stride[2]);
  float *u_piece = nullptr, *o_piece = nullptr;
  Turn turn;
  TileWalk<false> walk(shape, here);
#pragma unroll 1
  for (; walk.more(); walk.next()) {
    if (walk.enters()) {
      state.enter(walk);
      if (u != nullptr) u_piece = u + walk.token * shape.n * p.u.stride[1];
      o_piece = o + walk.token * p.o.stride[1];
    }
    TileRows solved;
#pragma unroll 1
    for (int member = 0; member < here.group; ++member, turn.next(space.stages)) {
      const int stage = turn.place;
      const Weights& weights = space.weights(stage);
      wait(&barriers.made[stage], turn.parity);
      TileRows sums[2], &read = sums[0], &out = sums[1];  // S^T b, S^T q
      if (member == 0) {
        state.template read<2>(sums, {space.b(stage), space.q(stage)});
        exchange.give(0, read);
        if (!makes_o) exchange.give(1, out);
        TileRows z;
        take_values(z, space.values(stage), state.own);
        exchange.meet();
        exchange.add(0, read);
        scale_tile(read, weights.through);
        subtract(z, read);
        solved = solution(z, weights);
        if (!makes_o && u != nullptr) {
          store_steps(solved, u_piece, u_stride, walk.first, walk.rows(), state.col, in_fours(shape.V));
        }
      } else {
        state.template read<1>(reinterpret_cast<TileRows(&)[1]>(out), {space.q(stage)});
        if (!makes_o) exchange.give(1, out);
        exchange.meet();
      }
      if (makes_o) {
        exchange.add(1, out);
        scale_tile(out, weights.through, shape.scale);
        add(out, weighed(solved, weights.p));
        store_tokens(out, o_piece + member * o_member, o_stride, weights, state.col, shape.V);
      }
      if (member + 1 == here.group) {
        scale_tile(solved, weights.after);
        state.decay(weights);
        state.add_update(solved, space.k(stage));
      }
      arrive_once(&barriers.empty[stage]);
      exchange.turn ^= 1;
    }
  }
  // The last token may complete a chunk.
  if (here.tokens > 0 && walk.completed && walk.place.part == 0 && shape.pieces.between != Between::none) {
    state.publish(walk.place.number);
    state.apply_between();
  }
}

// Reverse, visit of a tile by one query head: r = e^{L_C - L} dS^T k for the first head; r += P^T do and dS
// <- dS + scale e^L q do; du = X^T r and dS <- dS - e^L b du for the last head. The first warp of the group
// stores du, the second adds P^T do.
template <int Tile>
__device__ inline void run_reverse(ChainState<Tile>& state, const TileSpace<Tile>& space,
                                   Exchanger& exchange) {
  const DeltaExactScan& p = state.p;
  const DeltaExactShape& shape = state.shape;
  const Walked& here = state.here;
  TileBarriers& barriers = space.barriers();
  float* const u = at<float>(p.u, here.sequence.batch, here.sequence.start * shape.n, here.head, state.col);
  const int u_stride = static_cast<int>(p.u.stride[1]);
  float* u_piece = nullptr;
  Turn turn;
#pragma unroll 1
  for (TileWalk<true> walk(shape, here); walk.more(); walk.next()) {
    if (walk.enters()) {
      state.enter(walk);
      u_piece = u + walk.token * shape.n * p.u.stride[1];
    }
    TileRows rows[1], &r = rows[0];
#pragma unroll 1
    for (int member = 0; member < here.group; ++member, turn.next(space.stages)) {
      const int stage = turn.place;
      const Weights& weights = space.weights(stage);
      wait(&barriers.made[stage], turn.parity);
      if (member == 0) {
        state.template read<1>(rows, {space.k(stage)});
        scale_tile(r, weights.after);
        state.decay(weights);
      }
      TileRows dout;
      take_values(dout, space.values(stage), state.own);
      if (state.part == 1) add(r, weighed(dout, weights.p));
      const bool last = member + 1 == here.group;
      if (last) exchange.give(0, r);
      scale_tile(dout, weights.through, shape.scale);
      state.add_update(dout, space.q(stage));
      if (last) {
        exchange.meet();
        exchange.add(0, r);
        TileRows du = solution(r, weights);
        if (state.part == 0) {
          store_steps(du, u_piece, u_stride, walk.first, walk.rows(), state.col, in_fours(shape.V));
        }
        scale_tile(du, weights.through, -1.f);
        state.add_update(du, space.b(stage));
        exchange.turn ^= 1;
      }
      arrive_once(&barriers.empty[stage]);
    }
  }
}

}  // namespace girih::kernels::delta_product::by_tile

// The state warps of the fp32 scan. A group of two warps has sixteen columns of V; each warp has half of D,
// and the two warps add their partial products with the state.
#pragma once

#include "delta_product/fp32_state.cuh"

namespace girih::kernels::delta_product::fp32_scan {

// Adds the partial sums over D of the two warps of a group.
struct PartialSumExchange {
  PartialSums& partial_sums;
  const int group, part;
  int buffer = 0;

  __device__ void store_sums(int which, const TileFragment& x) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      partial_sums.lane_sums[buffer][part][2 * which + n][lane()] = {x.at[n][0], x.at[n][1], x.at[n][2],
                                                                     x.at[n][3]};
    }
  }
  // Barrier: both warps have stored their sums, and have read those of the previous exchange.
  __device__ void sync() const { named_barrier_sync(1 + group, 32 * kParts); }
  __device__ void add(int which, TileFragment& x) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 y = partial_sums.lane_sums[buffer][1 - part][2 * which + n][lane()];
      x.at[n][0] += y.x, x.at[n][1] += y.y, x.at[n][2] += y.z, x.at[n][3] += y.w;
    }
  }
};

// Forward, visit of a tile by one query head: z = w - e^L S^T b, u = X z for the first head; o = scale e^L
// S^T q + P u; S <- e^{L_C} S + k (e^{L_C - L} u) for the last head. The first warp of the group stores u,
// the second computes o.
template <int Width>
__device__ inline void run_forward_state_warps(WarpState<Width>& state, const TileStorage<Width>& storage,
                                               PartialSumExchange& exchange) {
  const DeltaFp32Scan& p = state.p;
  const DeltaFp32Shape& shape = state.shape;
  const HeadWork& work = state.work;
  TileBarriers& barriers = storage.barriers();
  const bool makes_o = state.part == 1;
  const int64_t batch = work.sequence.batch, start = work.sequence.start;
  float* const o = at<float>(p.o, batch, start, work.head * work.group, state.col);
  float* const u =
      p.u.data == nullptr ? nullptr : at<float>(p.u, batch, start * shape.n, work.head, state.col);
  // 32-bit offsets from the start of the segment; addresses are recomputed at each store.
  const int u_stride = static_cast<int>(p.u.stride[1]), o_stride = static_cast<int>(p.o.stride[1]),
            o_member = static_cast<int>(p.o.stride[2]);
  float *u_segment = nullptr, *o_segment = nullptr;
  PipelineState pipe;
  TileIterator<false> tile_iterator(shape, work);
#pragma unroll 1
  for (; tile_iterator.has_tile(); tile_iterator.next()) {
    if (tile_iterator.is_first_of_segment()) {
      state.start_segment(tile_iterator);
      if (u != nullptr) u_segment = u + tile_iterator.token * shape.n * p.u.stride[1];
      o_segment = o + tile_iterator.token * p.o.stride[1];
    }
    TileFragment solved;
#pragma unroll 1
    for (int member = 0; member < work.group; ++member, pipe.next(storage.stages)) {
      const int stage = pipe.stage;
      const TileMatrices& matrices = storage.matrices(stage);
      barriers.matrices_full.wait(pipe);
      TileFragment sums[2], &read = sums[0], &out = sums[1];  // S^T b, S^T q
      if (member == 0) {
        state.template read<2>(sums, {storage.b(stage), storage.q(stage)});
        exchange.store_sums(0, read);
        if (!makes_o) exchange.store_sums(1, out);
        TileFragment z;
        load_values(z, storage.values(stage), state.block_col);
        exchange.sync();
        exchange.add(0, read);
        scale_tile(read, matrices.decay_from_block_start);
        subtract(z, read);
        solved = multiply_inverse(z, matrices);
        if (!makes_o && u != nullptr) {
          store_steps(solved, u_segment, u_stride, tile_iterator.first, tile_iterator.rows(), state.col,
                      round_up_to_4(shape.V));
        }
      } else {
        state.template read<1>(reinterpret_cast<TileFragment(&)[1]>(out), {storage.q(stage)});
        if (!makes_o) exchange.store_sums(1, out);
        exchange.sync();
      }
      if (makes_o) {
        exchange.add(1, out);
        scale_tile(out, matrices.decay_from_block_start, shape.scale);
        add(out, multiply_scores(solved, matrices.p));
        store_tokens(out, o_segment + member * o_member, o_stride, matrices, state.col, shape.V);
      }
      if (member + 1 == work.group) {
        scale_tile(solved, matrices.decay_to_block_end);
        state.decay(matrices);
        state.add_update(solved, storage.k(stage));
      }
      barriers.empty.arrive_warp(stage);
      exchange.buffer ^= 1;
    }
  }
  // The last token may complete a chunk.
  if (work.tokens > 0 && tile_iterator.is_previous_complete && tile_iterator.position.part == 0 &&
      shape.segments.between != Between::none) {
    state.save_state(tile_iterator.position.index);
    state.apply_between();
  }
}

// Reverse, visit of a tile by one query head: r = e^{L_C - L} dS^T k for the first head; r += P^T do and dS
// <- dS + scale e^L q do; du = X^T r and dS <- dS - e^L b du for the last head. The first warp of the group
// stores du, the second adds P^T do.
template <int Width>
__device__ inline void run_reverse_state_warps(WarpState<Width>& state, const TileStorage<Width>& storage,
                                               PartialSumExchange& exchange) {
  const DeltaFp32Scan& p = state.p;
  const DeltaFp32Shape& shape = state.shape;
  const HeadWork& work = state.work;
  TileBarriers& barriers = storage.barriers();
  float* const u = at<float>(p.u, work.sequence.batch, work.sequence.start * shape.n, work.head, state.col);
  const int u_stride = static_cast<int>(p.u.stride[1]);
  float* u_segment = nullptr;
  PipelineState pipe;
#pragma unroll 1
  for (TileIterator<true> tile_iterator(shape, work); tile_iterator.has_tile(); tile_iterator.next()) {
    if (tile_iterator.is_first_of_segment()) {
      state.start_segment(tile_iterator);
      u_segment = u + tile_iterator.token * shape.n * p.u.stride[1];
    }
    TileFragment rows[1], &r = rows[0];
#pragma unroll 1
    for (int member = 0; member < work.group; ++member, pipe.next(storage.stages)) {
      const int stage = pipe.stage;
      const TileMatrices& matrices = storage.matrices(stage);
      barriers.matrices_full.wait(pipe);
      if (member == 0) {
        state.template read<1>(rows, {storage.k(stage)});
        scale_tile(r, matrices.decay_to_block_end);
        state.decay(matrices);
      }
      TileFragment dout;
      load_values(dout, storage.values(stage), state.block_col);
      if (state.part == 1) add(r, multiply_scores(dout, matrices.p));
      const bool last = member + 1 == work.group;
      if (last) exchange.store_sums(0, r);
      scale_tile(dout, matrices.decay_from_block_start, shape.scale);
      state.add_update(dout, storage.q(stage));
      if (last) {
        exchange.sync();
        exchange.add(0, r);
        TileFragment du = multiply_inverse(r, matrices);
        if (state.part == 0) {
          store_steps(du, u_segment, u_stride, tile_iterator.first, tile_iterator.rows(), state.col,
                      round_up_to_4(shape.V));
        }
        scale_tile(du, matrices.decay_from_block_start, -1.f);
        state.add_update(du, storage.b(stage));
        exchange.buffer ^= 1;
      }
      barriers.empty.arrive_warp(stage);
    }
  }
}

}  // namespace girih::kernels::delta_product::fp32_scan

// The loaders of head_read_kernel: copy q, k, v of chunks, and compute the running sums of the gates.
#pragma once

#include "gla/head_block.cuh"

namespace girih::kernels {

// Warp 0 also computes L, and w = e^{L_C - L}, in reverse w = scale e^L.
template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::load() const {
  const int64_t batch = walk.sequence.batch;
  const int key_head = head / shape.key_share, head_of_query = query_head / shape.query_share;
  const TileCopier<32 * kLoaders, decltype(Stage::q)> q(
      at<T>(p.q, batch, walk.start, Reverse ? key_head : head_of_query), p.q.stride[1], shape.D, threadIdx.x);
  const TileCopier<32 * kLoaders, decltype(Stage::k)> k(
      at<T>(p.k, batch, walk.start, Reverse ? head_of_query : key_head), p.k.stride[1], shape.D, threadIdx.x);
  const TileCopier<32 * kLoaders, Values> v(at<T>(p.v, batch, walk.start, Reverse ? query_head : head, col),
                                            p.v.stride[1], cols, threadIdx.x);
  leave_registers<kLoaderRegisters>();
  const auto gates_of = [&](int turn) {
    const int token = walk.token_of(turn);
    return GatePair::load(shape.g, walk.sequence, walk.start + token, head,
                          turn < walk.chunks ? walk.length - token : 0);
  };
  const auto prefetch_gates = [&](int turn) {
    const int token = walk.token_of(turn);
    if (turn < walk.chunks)
      GatePair::prefetch(shape.g, walk.sequence, walk.start + token, head, walk.length - token);
  };
  GatePair gates = gates_of(0);
  if (warp == 0) {
    for (int turn = 1; turn < kGatesAhead; ++turn) prefetch_gates(turn);
  }
  Turn at, of_values;
#pragma unroll 1
  for (int turn = 0; turn < walk.chunks; ++turn) {
    wait(&ring.stage_free[at.place], at.parity ^ 1);
    wait(&ring.values_free[of_values.place], of_values.parity ^ 1);
    const Stage stage = stage_at(at.place);
    const int token = walk.token_of(turn), rows = walk.rows_from(token);
    k.start(stage.k, token, rows);
    v.start(values_at(of_values.place), token, rows);
    if (!alone) q.start(stage.q, token, rows);
    arrive_after_copies(&ring.full[of_values.place]);
    if (warp == 0) {
      float* sums = ring.sums[of_values.place];
      gates.put_sums(sums);
      __syncwarp();
      const float2 sum = *reinterpret_cast<const float2*>(sums + 2 * lane());
      const float whole = sums[kChunk - 1];
      *reinterpret_cast<float2*>(ring.weights[of_values.place] + 2 * lane()) =
          Reverse ? float2{shape.scale * exp2_fast(sum.x), shape.scale * exp2_fast(sum.y)}
                  : float2{exp2_fast(whole - sum.x), exp2_fast(whole - sum.y)};
      arrive(&ring.full[of_values.place]);
      gates = gates_of(turn + 1);
      prefetch_gates(turn + kGatesAhead);
    }
    at.next(pass.stages), of_values.next(pass.values);
  }
}

}  // namespace girih::kernels

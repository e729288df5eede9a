// The loaders of head_read_kernel: copy q, k, v of chunks, and compute the running sums of the gates.
#pragma once

#include "gla/head_block.cuh"

namespace girih::kernels {

// Warp 0 also computes L, and w = e^{L_C - L}, in reverse w = scale e^L.
template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::run_loaders() const {
  const int64_t batch = range.sequence.batch;
  const int key_head = head / shape.key_share, q_head = query_head / shape.query_share;
  const TileCopier<32 * kLoaders, decltype(Stage::q)> q(
      at<T>(p.q, batch, range.start, Reverse ? key_head : q_head), p.q.stride[1], shape.D, threadIdx.x);
  const TileCopier<32 * kLoaders, decltype(Stage::k)> k(
      at<T>(p.k, batch, range.start, Reverse ? q_head : key_head), p.k.stride[1], shape.D, threadIdx.x);
  const TileCopier<32 * kLoaders, Values> v(at<T>(p.v, batch, range.start, Reverse ? query_head : head, col),
                                            p.v.stride[1], cols, threadIdx.x);
  setmaxnreg_dec<kLoaderRegisters>();
  const auto gates_of = [&](int step) {
    const int token = range.first_token(step);
    return GatePair::load(shape.g, range.sequence, range.start + token, head,
                          step < range.chunks ? range.length - token : 0);
  };
  const auto prefetch_gates = [&](int step) {
    const int token = range.first_token(step);
    if (step < range.chunks)
      GatePair::prefetch(shape.g, range.sequence, range.start + token, head, range.length - token);
  };
  GatePair gates = gates_of(0);
  if (warp == 0) {
    for (int step = 1; step < kGatePrefetchDistance; ++step) prefetch_gates(step);
  }
  PipelineState stage_pipe, value_pipe;
#pragma unroll 1
  for (int step = 0; step < range.chunks; ++step) {
    ring.stage_empty.wait(stage_pipe);
    ring.values_empty.wait(value_pipe);
    const Stage stage = stage_at(stage_pipe.stage);
    const int token = range.first_token(step), rows = range.count_rows(token);
    k.start(stage.k, token, rows);
    v.start(values_at(value_pipe.stage), token, rows);
    if (!is_local_scan) q.start(stage.q, token, rows);
    ring.full.arrive_after_copies(value_pipe.stage);
    if (warp == 0) {
      float* sums = ring.sums[value_pipe.stage];
      gates.store_prefix_sums(sums);
      __syncwarp();
      const float2 sum = *reinterpret_cast<const float2*>(sums + 2 * lane());
      const float chunk_sum = sums[kChunk - 1];
      *reinterpret_cast<float2*>(ring.weights[value_pipe.stage] + 2 * lane()) =
          Reverse ? float2{shape.scale * exp2_fast(sum.x), shape.scale * exp2_fast(sum.y)}
                  : float2{exp2_fast(chunk_sum - sum.x), exp2_fast(chunk_sum - sum.y)};
      ring.full.arrive(value_pipe.stage);
      gates = gates_of(step + 1);
      prefetch_gates(step + kGatePrefetchDistance);
    }
    stage_pipe.next(params.stages), value_pipe.next(params.value_stages);
  }
}

}  // namespace girih::kernels

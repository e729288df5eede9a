// The state warps of head_read_kernel: S^T in registers in fp32. Before each chunk these warps write the
// rounded S^T for the output warps.
#pragma once

#include "gla/head_block.cuh"
#include "tile/strided_elements.h"

namespace girih::kernels {

// S^T <- e^{L_C} S^T + (w v)^T k
template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::run_state_warps() const {
  constexpr int kKeys = D <= 128 ? D : 128, kN = kKeys / 8;
  const int first_value = (warp - kFirstStateWarp) % 4 * kWarpRows,
            first_key = (warp - kFirstStateWarp) / 4 * kKeys;
  const auto for_each_element = [&](Accumulator<kN>& state, auto* first, int64_t value_stride,
                                    int64_t key_stride, const auto& f) {
    for_each_strided_element<kN>([&](int n) -> float(&)[4] { return state.at[n]; },
                                 col + first_value + lane_row(), shape.values, first_key + lane_col(),
                                 shape.keys, first, value_stride, key_stride, f);
  };
  const int64_t initial_index =
      params.segmentation.segment_tokens == 0 ? range.sequence.index : segment_index;
  Accumulator<kN> state;
  fill(state, 0.f);
  if (p.initial.data != nullptr) {
    const float* from = static_cast<const float*>(p.initial.data) + initial_index * p.initial.stride[0] +
                        state_head * p.initial.stride[1];
    for_each_element(state, from, p.initial.stride[2], p.initial.stride[3],
                     [](float& element, const float& stored) { element = stored; });
  }
  float total = 0.f;
  // (w v)^T of a chunk for the warp's rows, computed while the previous product is in flight.
  AFragment<4> weighted;
  const auto load_weighted_values = [&](AFragment<4>& to, const PipelineState& pipe) {
    ring.full.wait(pipe);
    const Values v = values_at(pipe.stage);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      load_scaled_transposed<T>(to.at[k], v, first_value, 16 * k, ring.weights[pipe.stage] + 16 * k);
    }
  };
  PipelineState stage_pipe, value_pipe, state_pipe;
  if (range.chunks > 0) load_weighted_values(weighted, value_pipe);
#pragma unroll 1
  for (int step = 0; step < range.chunks; ++step) {
    if (!is_local_scan) {
      ring.state_empty.wait(state_pipe);
      const State state_tile = state_at(state_pipe.stage);
      AFragment<kN / 2> rounded;
      round_to_a_fragment<T>(rounded, state);
      // With store_blocks, which has one address for all blocks, ptxas spills twice as much.
#pragma unroll
      for (int k = 0; k < kN / 2; ++k) {
        store_block(state_tile, first_value, first_key + 16 * k, rounded.at[k]);
      }
      fence_async_proxy();
      ring.state_full.arrive(state_pipe.stage);
      state_pipe.next(params.state_stages);
    }

    const float chunk_sum = ring.sums[value_pipe.stage][kChunk - 1], decay = exp2_fast(chunk_sum);
    ring.values_empty.arrive(value_pipe.stage);
    total += chunk_sum;
    scale_rows(state, {decay, decay});
    fence_async_proxy();
    wgmma_fence(state);
    wgmma_start<T>(state, weighted, stage_at(stage_pipe.stage).k, first_key);
    wgmma_commit();
    value_pipe.next(params.value_stages);
    AFragment<4> next;
    const bool has_next = step + 1 < range.chunks, has_stages = params.stages > 1;
    if (has_next && has_stages) load_weighted_values(next, value_pipe);
    wgmma_wait<0>(state);
    keep_registers(weighted);
    ring.stage_empty.arrive(stage_pipe.stage);
    stage_pipe.next(params.stages);
    if (has_next && !has_stages) load_weighted_values(next, value_pipe);
    if (has_next) weighted = next;
  }

  if (is_local_scan && warp == kFirstStateWarp) {
    for (int key = lane(); key < shape.keys; key += 32) {
      params.segmentation.gate_sums[(segment_index * scanned_heads + state_head) * shape.keys + key] =
          total / kLog2E;
    }
  }
  // Query heads with the same memory head compute the same state; the first writes it.
  const bool is_writer = Reverse || query_head % group_size == 0;
  if (p.final.data != nullptr && is_writer && (is_local_scan || range.is_last_segment)) {
    float* to = static_cast<float*>(p.final.data) +
                (is_local_scan ? segment_index : range.sequence.index) * p.final.stride[0] +
                state_head * p.final.stride[1];
    for_each_element(state, to, p.final.stride[2], p.final.stride[3],
                     [](float element, float& stored) { stored = element; });
  }
}

}  // namespace girih::kernels

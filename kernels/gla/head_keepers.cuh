// The state warps of head_read_kernel: S^T in registers in fp32. Before each chunk these warps write the
// rounded S^T for the output warps.
#pragma once

#include "gla/head_block.cuh"
#include "tile/places.h"

namespace girih::kernels {

// S^T <- e^{L_C} S^T + (w v)^T k
template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::keep_state() const {
  constexpr int kKeys = D <= 128 ? D : 128, kN = kKeys / 8;
  const int first_value = (warp - kFirstKeeper) % 4 * kRows, first_key = (warp - kFirstKeeper) / 4 * kKeys;
  const auto for_each_element = [&](Sums<kN>& state, auto* first, int64_t by_value, int64_t by_key,
                                    const auto& f) {
    for_each_place<kN>([&](int n) -> float(&)[4] { return state.at[n]; }, col + first_value + lane_row(),
                       shape.values, first_key + lane_col(), shape.keys, first, by_value, by_key, f);
  };
  const int64_t of_initial = pass.cut.tokens == 0 ? walk.sequence.index : number;
  Sums<kN> state;
  fill(state, 0.f);
  if (p.initial.data != nullptr) {
    const float* from = static_cast<const float*>(p.initial.data) + of_initial * p.initial.stride[0] +
                        state_head * p.initial.stride[1];
    for_each_element(state, from, p.initial.stride[2], p.initial.stride[3],
                     [](float& element, const float& at) { element = at; });
  }
  float total = 0.f;
  // (w v)^T of a chunk for the warp's rows, computed while the previous product is in flight.
  Operand<4> weighted;
  const auto weigh = [&](Operand<4>& to, const Turn& of) {
    wait(&ring.full[of.place], of.parity);
    const Values v = values_at(of.place);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      load_weighed_transposed<T>(to.at[k], v, first_value, 16 * k, ring.weights[of.place] + 16 * k);
    }
  };
  Turn at, of_values, to;
  if (walk.chunks > 0) weigh(weighted, of_values);
#pragma unroll 1
  for (int turn = 0; turn < walk.chunks; ++turn) {
    if (!alone) {
      wait(&ring.used[to.place], to.parity ^ 1);
      const State carried = state_at(to.place);
      Operand<kN / 2> rounded;
      round_to<T>(rounded, state);
      // With store_blocks, which has one address for all blocks, ptxas spills twice as much.
#pragma unroll
      for (int k = 0; k < kN / 2; ++k) {
        store_block(carried, first_value, first_key + 16 * k, rounded.at[k]);
      }
      fence_tiles();
      arrive(&ring.carried[to.place]);
      to.next(pass.slots);
    }

    const float whole = ring.sums[of_values.place][kChunk - 1], decay = exp2_fast(whole);
    arrive(&ring.values_free[of_values.place]);
    total += whole;
    scale_rows(state, {decay, decay});
    fence_tiles();
    fence_products(state);
    start_product<T>(state, weighted, stage_at(at.place).k, first_key);
    commit_products();
    of_values.next(pass.values);
    Operand<4> next;
    const bool follows = turn + 1 < walk.chunks, ahead = pass.stages > 1;
    if (follows && ahead) weigh(next, of_values);
    wait_products<0>(state);
    keep(weighted);
    arrive(&ring.stage_free[at.place]);
    at.next(pass.stages);
    if (follows && !ahead) weigh(next, of_values);
    if (follows) weighted = next;
  }

  if (alone && warp == kFirstKeeper) {
    for (int key = lane(); key < shape.keys; key += 32) {
      pass.cut.decay[(number * walkers + state_head) * shape.keys + key] = total / kLog2E;
    }
  }
  // Query heads with the same memory head compute the same state; the first writes it.
  const bool mine = Reverse || query_head % group == 0;
  if (p.final.data != nullptr && mine && (alone || walk.nothing_follows)) {
    float* to = static_cast<float*>(p.final.data) +
                (alone ? number : walk.sequence.index) * p.final.stride[0] + state_head * p.final.stride[1];
    for_each_element(state, to, p.final.stride[2], p.final.stride[3],
                     [](float element, float& at) { at = element; });
  }
}

}  // namespace girih::kernels

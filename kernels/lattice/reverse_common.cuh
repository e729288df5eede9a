// Common code of the two reverse scans: start and end of a sequence, and a warp's 16 vectors by blocks.
#pragma once

#include "lattice/scan_common.cuh"

namespace girih::kernels::lattice {

// Calls f(k, the 16 x 16 block from column 16 k on).
template <int N, class F>
__device__ inline void for_each_block(Accumulator<N>& sums, const F& f) {
#pragma unroll
  for (int k = 0; k < N / 2; ++k) f(k, reinterpret_cast<float(&)[2][4]>(sums.at[2 * k]));
}
// Calls f(element, the same element of an A fragment, row 0 or 1 of the lane).
template <typename T, class F>
__device__ inline void for_each_element_pair(float (&sums)[2][4], const uint32_t (&a)[4], const F& f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack_pair<T>(a[i]);
    f(sums[i / 2][i % 2 * 2], x.x, i % 2);
    f(sums[i / 2][i % 2 * 2 + 1], x.y, i % 2);
  }
}

// Whether the last chunk of the sequence is incomplete.
__device__ inline bool has_incomplete_end(const LatticeShape& shape, const ChunkedSequence& of) {
  return of.chunks > 0 && !chunk_of(shape.grid, of, of.chunks - 1).is_complete;
}

// Loads dS' after the last chunk, and calls put(k, S' rounded, from column 16 k on). Returns the lane's terms
// of Delta'.dDelta'.
template <typename T, int N, class Put>
__device__ inline float load_final_gradient(Accumulator<N>& dS, const LatticeReverse& p,
                                            const ChunkedSequence& of, int head, int first, const Put& put) {
  const int64_t sequence = of.sequence.index;
  const bool ends_incomplete = has_incomplete_end(p.shape, of);
  load_vectors(dS, p.last, sequence, head, p.shape, first);
  for_each_block(dS, [&](int k, float(&)[2][4]) {
    AFragment<1> rounded;
    round_to_a_fragment<T>(rounded, dS, 2 * k);
    put(k, rounded.at[0]);
  });
  __syncwarp();
  load_vectors(dS, ends_incomplete ? p.dlast_step : p.dlast, sequence, head, p.shape, first);
  float sum = 0.f;
  if (ends_incomplete) {
    for_each_element(dS, p.last_step, sequence, head, p.shape, first,
                     [&](float& d, const float& x, int) { sum = fmaf(d, x, sum); });
  }
  return sum;
}

// Stores a warp's sum over all elements.
__device__ inline void store_sum(float* to, float x) {
  x = sum_over_col(sum_over_row(x));
  if (lane() == 0) *to = x;
}

// Sums of the gradient through e^{L_C} Delta of a resumed chunk, for both vectors of the lane.
struct StepSums {
  float ahead[2] = {0.f, 0.f}, square[2] = {0.f, 0.f};  // e^{L_C} Delta.dx, |e^{L_C} Delta|^2
};
// Adds e^{L_C} dx to dDelta if `stores`, and returns the sums. `call_decay` is e^{L_C} of this call's tokens.
template <int N>
__device__ inline StepSums apply_step_gradient(const LatticeReverse& p, Accumulator<N>& dx, int64_t sequence,
                                               int head, int first, float call_decay, const float (&rho)[2],
                                               bool stores = true) {
  StepSums step_sums;
  for_each_element(dx, p.start.step, sequence, head, p.shape, first, [&](float& d, const float& step, int j) {
    step_sums.ahead[j] = fmaf(call_decay * step, d, step_sums.ahead[j]);
    step_sums.square[j] = fmaf(call_decay * step, call_decay * step, step_sums.square[j]);
  });
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    step_sums.ahead[j] = sum_over_row(step_sums.ahead[j]),
    step_sums.square[j] = sum_over_row(step_sums.square[j]);
  }
  if (!stores) return step_sums;
  for_each_element(dx, p.dstep, sequence, head, p.shape, first,
                   [&](float& d, float& at, int j) { at = rho[j] > 0.f ? fmaf(call_decay, d, at) : at; });
  return step_sums;
}

// Adds the terms of fp32 states to dS: -c Delta' and the gradient of S if the chunk is incomplete, and
// e^{L_C} c Delta if the chunk is resumed.
template <int N>
__device__ inline void add_state_terms(Accumulator<N>& dS, const LatticeReverse& p, int64_t sequence,
                                       int head, int first, const float (&c)[2], bool complete, bool resumed,
                                       float call_decay) {
  if (!complete) {
    for_each_element(dS, p.last_step, sequence, head, p.shape, first,
                     [&](float& d, const float& x, int j) { d = fmaf(-c[j], x, d); });
    if (p.dlast.data != nullptr) {
      for_each_element(dS, p.dlast, sequence, head, p.shape, first,
                       [](float& d, const float& x, int) { d += x; });
    }
  }
  if (resumed) {
    for_each_element(dS, p.start.step, sequence, head, p.shape, first,
                     [&](float& d, const float& step, int j) { d = fmaf(call_decay * c[j], step, d); });
  }
}

// Stores the gradients of the initial state. `sums`: from store_sum(), for each warp Delta'.dDelta', and m_C
// c of a resumed chunk.
template <int Warps, int N>
__device__ inline void store_initial_gradients(const LatticeReverse& p, Accumulator<N>& dS,
                                               const ChunkedSequence& of, int head, int first,
                                               const float* sums) {
  const int64_t sequence = of.sequence.index;
  const LatticeShape& shape = p.shape;
  // Projection to the tangent space: dS - s (s.dS).
  float along[2] = {0.f, 0.f};
  for_each_element(dS, p.start.memory, sequence, head, shape, first,
                   [&](float& d, const float& x, int j) { along[j] = fmaf(x, d, along[j]); });
#pragma unroll
  for (int j = 0; j < 2; ++j) along[j] = sum_over_row(along[j]);
  for_each_element(dS, p.start.memory, sequence, head, shape, first,
                   [&](float& d, const float& x, int j) { d = fmaf(-x, along[j], d); });
  store_vectors(p.dmemory, dS, sequence, head, shape, first);
  const bool resumed = of.prior_tokens > 0 && of.chunks > 0;
  if (p.dstep.data != nullptr && !resumed) {
    fill(dS, 0.f);
    if (of.chunks == 0) load_vectors(dS, p.dlast_step, sequence, head, shape, first);
    store_vectors(p.dstep, dS, sequence, head, shape, first);
  }

  named_barrier_sync(1, 32 * Warps);
  if (threadIdx.x != 0) return;
  const bool ends_incomplete = has_incomplete_end(shape, of);
  float dlast = 0.f, resumed_decay = 0.f, delta_dot = 0.f;
  if (p.dlast_decay.data != nullptr && (ends_incomplete || of.chunks == 0))
    dlast = load_element(p.dlast_decay, sequence, head);
  for (int w = 0; w < Warps; ++w) delta_dot += sums[w], resumed_decay += sums[Warps + w];
  if (p.dend_decay.data != nullptr)
    store_element(p.dend_decay, ends_incomplete ? delta_dot + dlast : 0.f, sequence, head);
  if (p.ddecay.data != nullptr) {
    float before = 0.f;
    if (resumed) before = static_cast<const float*>(p.ddecay.data)[offset_of(p.ddecay, sequence, head)];
    // The final decay depends on the initial decay only if no chunk ends in this call.
    store_element(p.ddecay,
                  before + resumed_decay + (of.chunks == 0 || (resumed && of.chunks == 1) ? dlast : 0.f),
                  sequence, head);
  }
}

}  // namespace girih::kernels::lattice

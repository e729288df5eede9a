// Common code of the two reverse scans: start and end of a sequence, and a warp's 16 vectors by blocks.
#pragma once

#include "lattice/vectors.cuh"

namespace girih::kernels::lattice {

// Calls f(k, the 16 x 16 block from column 16 k on).
template <int N, class F>
__device__ inline void for_blocks(Sums<N>& sums, const F& f) {
#pragma unroll
  for (int k = 0; k < N / 2; ++k) f(k, reinterpret_cast<float(&)[2][4]>(sums.at[2 * k]));
}
// Calls f(element, the same element of an A fragment, row 0 or 1 of the lane).
template <typename T, class F>
__device__ inline void with_block(float (&sums)[2][4], const uint32_t (&a)[4], const F& f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpaired<T>(a[i]);
    f(sums[i / 2][i % 2 * 2], x.x, i % 2);
    f(sums[i / 2][i % 2 * 2 + 1], x.y, i % 2);
  }
}

// Whether the last chunk of the sequence is incomplete.
__device__ inline bool ends_in_chunk(const LatticeShape& shape, const ChunkedSequence& of) {
  return of.chunks > 0 && !chunk_of(shape.grid, of, of.chunks - 1).complete;
}

// Loads dS' after the last chunk, and calls put(k, S' rounded, from column 16 k on). Returns the lane's terms
// of Delta'.dDelta'.
template <typename T, int N, class Put>
__device__ inline float begin_reverse(Sums<N>& dS, const LatticeReverse& p, const ChunkedSequence& of,
                                      int head, int first, const Put& put) {
  const int64_t sequence = of.sequence.index;
  const bool within = ends_in_chunk(p.shape, of);
  load_vectors(dS, p.last, sequence, head, p.shape, first);
  for_blocks(dS, [&](int k, float(&)[2][4]) {
    Operand<1> rounded;
    round_to<T>(rounded, dS, 2 * k);
    put(k, rounded.at[0]);
  });
  __syncwarp();
  load_vectors(dS, within ? p.dlast_step : p.dlast, sequence, head, p.shape, first);
  float sum = 0.f;
  if (within) {
    for_elements(dS, p.last_step, sequence, head, p.shape, first,
                 [&](float& d, const float& x, int) { sum = fmaf(d, x, sum); });
  }
  return sum;
}

// Stores a warp's sum over all elements.
__device__ inline void put_sum(float* to, float x) {
  x = sum_over_col(sum_over_row(x));
  if (lane() == 0) *to = x;
}

// Gradient through e^{L_C} Delta of a resumed chunk. Stores dDelta if `stores`, and returns sums of both
// vectors of the lane.
struct WithStep {
  float ahead[2] = {0.f, 0.f}, square[2] = {0.f, 0.f};  // e^{L_C} Delta.dx, |e^{L_C} Delta|^2
};
template <int N>
__device__ inline WithStep through_step(const LatticeReverse& p, Sums<N>& dx, int64_t sequence, int head,
                                        int first, float open, const float (&rho)[2], bool stores = true) {
  WithStep with;
  for_elements(dx, p.start.step, sequence, head, p.shape, first, [&](float& d, const float& step, int j) {
    with.ahead[j] = fmaf(open * step, d, with.ahead[j]);
    with.square[j] = fmaf(open * step, open * step, with.square[j]);
  });
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    with.ahead[j] = sum_over_row(with.ahead[j]), with.square[j] = sum_over_row(with.square[j]);
  }
  if (!stores) return with;
  for_elements(dx, p.dstep, sequence, head, p.shape, first,
               [&](float& d, float& at, int j) { at = rho[j] > 0.f ? fmaf(open, d, at) : at; });
  return with;
}

// Adds the terms of fp32 states to dS: -c Delta' and the gradient of S if the chunk is incomplete, and
// e^{L_C} c Delta if the chunk is resumed.
template <int N>
__device__ inline void add_states(Sums<N>& dS, const LatticeReverse& p, int64_t sequence, int head, int first,
                                  const float (&c)[2], bool complete, bool resumed, float open) {
  if (!complete) {
    for_elements(dS, p.last_step, sequence, head, p.shape, first,
                 [&](float& d, const float& x, int j) { d = fmaf(-c[j], x, d); });
    if (p.dlast.data != nullptr) {
      for_elements(dS, p.dlast, sequence, head, p.shape, first,
                   [](float& d, const float& x, int) { d += x; });
    }
  }
  if (resumed) {
    for_elements(dS, p.start.step, sequence, head, p.shape, first,
                 [&](float& d, const float& step, int j) { d = fmaf(open * c[j], step, d); });
  }
}

// Stores the gradients of the initial state. `sums`: from put_sum(), for each warp Delta'.dDelta', and m_C c
// of a resumed chunk.
template <int Warps, int N>
__device__ inline void end_reverse(const LatticeReverse& p, Sums<N>& dS, const ChunkedSequence& of, int head,
                                   int first, const float* sums) {
  const int64_t sequence = of.sequence.index;
  const LatticeShape& shape = p.shape;
  // Projection to the tangent space: dS - s (s.dS).
  float along[2] = {0.f, 0.f};
  for_elements(dS, p.start.memory, sequence, head, shape, first,
               [&](float& d, const float& x, int j) { along[j] = fmaf(x, d, along[j]); });
#pragma unroll
  for (int j = 0; j < 2; ++j) along[j] = sum_over_row(along[j]);
  for_elements(dS, p.start.memory, sequence, head, shape, first,
               [&](float& d, const float& x, int j) { d = fmaf(-x, along[j], d); });
  store_vectors(p.dmemory, dS, sequence, head, shape, first);
  const bool resumed = of.begun > 0 && of.chunks > 0;
  if (p.dstep.data != nullptr && !resumed) {
    fill(dS, 0.f);
    if (of.chunks == 0) load_vectors(dS, p.dlast_step, sequence, head, shape, first);
    store_vectors(p.dstep, dS, sequence, head, shape, first);
  }

  barrier_wait(1, 32 * Warps);
  if (threadIdx.x != 0) return;
  const bool within = ends_in_chunk(shape, of);
  float dlast = 0.f, open = 0.f, all = 0.f;
  if (p.dlast_decay.data != nullptr && (within || of.chunks == 0))
    dlast = load_any(p.dlast_decay, sequence, head);
  for (int w = 0; w < Warps; ++w) all += sums[w], open += sums[Warps + w];
  if (p.dopen.data != nullptr) store_any(p.dopen, within ? all + dlast : 0.f, sequence, head);
  if (p.ddecay.data != nullptr) {
    float before = 0.f;
    if (resumed) before = static_cast<const float*>(p.ddecay.data)[offset_of(p.ddecay, sequence, head)];
    // The final decay depends on the initial decay only if no chunk ends in this call.
    store_any(p.ddecay, before + open + (of.chunks == 0 || (resumed && of.chunks == 1) ? dlast : 0.f),
              sequence, head);
  }
}

}  // namespace girih::kernels::lattice

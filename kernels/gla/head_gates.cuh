// The gates of a chunk, one for each token: their running sums, and the decay of scores.
#pragma once

#include "gla/kernels.h"
#include "gsa/reads.cuh"
#include "tile/warpgroup.h"

namespace girih::kernels {

// The gates of two neighbouring tokens for each lane, of a chunk of `rows` tokens from `start`. The loaded
// values are not converted, so that nothing waits for the loads before store_prefix_sums().
struct GatePair {
  float first, second;

  __device__ static GatePair load(const InputTensor<3>& g, const Sequence& sequence, int64_t start, int head,
                                  int rows) {
    const auto gate = [&](int row) {
      if (g.data == nullptr || row >= rows) return 0.f;
      return load_element(g, sequence.batch, start + row, head);
    };
    return {gate(2 * lane()), gate(2 * lane() + 1)};
  }

  // Prefetches the gates to the L2 cache.
  __device__ static void prefetch(const InputTensor<3>& g, const Sequence& sequence, int64_t start, int head,
                                  int rows) {
    if (g.data == nullptr) return;
    const int64_t at = offset_of(g, sequence.batch, start, head);
    const int size = dtype_size(g.dtype);
#pragma unroll
    for (int row = lane(); row < kChunk; row += 32) {
      if (row < rows) kernels::prefetch(static_cast<const char*>(g.data) + (at + row * g.stride[1]) * size);
    }
  }

  // Writes L_i, the sum of the gates through row i in powers of two, to sums[0..63]. Called by a warp.
  __device__ void store_prefix_sums(float* sums) const {
    const auto power = [](float gate) { return kLog2E * clamp_gate(gate); };
    const float one = power(first), both = one + power(second);
    float through = both;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(~0u, through, step);
      if (lane() >= step) through += before;
    }
    float before = __shfl_up_sync(~0u, through, 1);
    if (lane() == 0) before = 0.f;
    *reinterpret_cast<float2*>(sums + 2 * lane()) = {before + one, through};
  }
};

// a_ij <- scale * e^{-|L_i - L_j|} a_ij for j <= i, or with is_later for j >= i, and 0 elsewhere; rows 16 w
// to 16 w + 15 of the scores of a chunk. By blocks of 16 columns: a block is used in full or not at all, and
// only the diagonal block is masked by element.
__device__ inline void decay_scores(Accumulator<8>& a, const float* sums, float scale, int warp,
                                    bool is_later) {
  const int first = kWarpRows * warp + lane_row();
  const float sign = is_later ? -1.f : 1.f;
  const float own[2] = {sign * sums[first], sign * sums[first + 8]};
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const bool is_used = is_later ? block >= warp : block <= warp;
#pragma unroll
    for (int n = 2 * block; n < 2 * block + 2; ++n) {
      const float2 sum = *reinterpret_cast<const float2*>(sums + 8 * n + lane_col());
      const float other[2] = {sign * sum.x, sign * sum.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = a.at[n][i];
        x = is_used ? x * scale * exp2_fast(own[i >> 1] - other[i & 1]) : 0.f;
      }
    }
    if (block != warp) continue;
    for_each_register<2>([&](int n, int i) {
      const int row = lane_row() + 8 * (i >> 1), col = 8 * n + lane_col() + (i & 1);
      // masked elements may have overflowed
      if (is_later ? col < row : col > row) a.at[2 * block + n][i] = 0.f;
    });
  }
}

}  // namespace girih::kernels

// The gates of a chunk, one a token, and what they do to scores.
#pragma once

#include "gla/head.h"
#include "gsa/decay.cuh"

namespace girih::kernels {

// Two neighbouring tokens' gates a lane, of a chunk of `rows` tokens from `start` on. As they are: nothing
// waits for them before their sums are asked for.
struct GatePair {
  float first, second;

  __device__ static GatePair load(const In<3>& g, const Sequence& sequence, int64_t start, int head,
                                  int rows) {
    const auto gate = [&](int row) {
      if (g.data == nullptr || row >= rows) return 0.f;
      return load_any(g.data, g.dtype,
                      sequence.batch * g.stride[0] + (start + row) * g.stride[1] + head * g.stride[2]);
    };
    return {gate(2 * lane()), gate(2 * lane() + 1)};
  }

  // By a warp: L_i, the sum of the gates through row i, in powers of two, to sums[0..63].
  __device__ void put_sums(float* sums) const {
    // e^-100 is 0 in fp32; a gate far below it, or -inf, would take the digits of all others in a sum.
    const auto power = [](float gate) { return kLog2E * (gate < -100.f ? -100.f : gate); };
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

// a_ij <- scale * e^{-|L_i - L_j|} a_ij on the side that counts, 0 on the other; a row's own token counts.
// Halves without a score are left out.
template <Side side>
__device__ inline void decay_scores(Scores& a, const float* sums, float scale, int warp) {
  const int first = kRows * warp + lane_row();
  const float own[2] = {sums[first], sums[first + 8]};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!has_half<side>(h, warp)) continue;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int col = 32 * h + 8 * n + lane_col();
      const float2 other = *reinterpret_cast<const float2*>(sums + col);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + 8 * (i >> 1), c = col + (i & 1);
        const float from = own[i >> 1], to = i & 1 ? other.y : other.x;
        const bool counts = side == Side::earlier ? c <= row : c >= row;
        const float between = side == Side::earlier ? from - to : to - from;
        float& x = a.half[h].at[n][i];
        // Masked before the exponential: on the other side it may overflow.
        x = counts ? x * scale * exp2_fast(counts ? between : 0.f) : 0.f;
      }
    }
  }
}

}  // namespace girih::kernels

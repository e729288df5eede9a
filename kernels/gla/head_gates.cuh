// The gates of a chunk, one a token, and what they do to scores.
#pragma once

#include "gla/head.h"
#include "gsa/decay.cuh"
#include "tile/warpgroup.h"

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

// a_ij <- scale * e^{-|L_i - L_j|} a_ij for j <= i, or with `later` for j >= i, and 0 elsewhere: rows 16 w to
// 16 w + 15 of the chunk's scores.
__device__ inline void decay_scores(Sums<8>& a, const float* sums, float scale, int warp, bool later) {
  const int first = kRows * warp + lane_row();
  const float own[2] = {sums[first], sums[first + 8]};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Of the first two warps' rows the later half has nothing, or of the last two's the earlier.
    const bool counts_here = later ? h == 1 || warp < 2 : h == 0 || warp >= 2;
#pragma unroll
    for (int n = 4 * h; n < 4 * h + 4; ++n) {
      if (!counts_here) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a.at[n][i] = 0.f;
        continue;
      }
      const int col = 8 * n + lane_col();
      const float2 other = *reinterpret_cast<const float2*>(sums + col);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + 8 * (i >> 1), c = col + (i & 1);
        const float from = own[i >> 1], to = i & 1 ? other.y : other.x;
        const bool counts = later ? c >= row : c <= row;
        float& x = a.at[n][i];
        // Masked before the exponential: on the other side it may overflow.
        x = counts ? x * scale * exp2_fast(counts ? later ? to - from : from - to : 0.f) : 0.f;
      }
    }
  }
}

}  // namespace girih::kernels

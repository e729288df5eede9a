// Online softmax.
#pragma once

#include <type_traits>

#include "tile/matrix.h"

namespace girih::kernels {

// The scale of scores: a factor above 0 in units of log2, and a sign that is applied to q. So the largest
// product q.k is the largest score, and a masked score stays -infinity. A scale of 0 becomes a factor too
// small to distinguish two scores.
struct CatScale {
  float magnitude, log2_scale;  // absolute value of the scale, unscaled and times log2(e)
  uint32_t sign;                // sign bits of two 16-bit numbers; the upper one is the sign bit of fp32

  __device__ explicit CatScale(float scale)
      : magnitude(fmaxf(fabsf(scale), 1e-37f)),
        log2_scale(magnitude * kLog2E),
        sign(scale < 0.f ? 0x80008000u : 0u) {}
  __device__ void apply_sign(uint32_t (&q)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] ^= sign;
  }
};

// e^{scale s - lse} of backward, with scale and lse multiplied by kCatUnit. For 16-bit elements these are in
// units of log2, and a weight takes two instructions. For fp32 kCatUnit is 1: for weights that are not small
// the difference is small, and its error is no larger than that of lse.
template <typename T>
constexpr float kCatUnit = std::is_same_v<T, float> ? 1.f : kLog2E;
template <typename T>
__device__ inline float cat_weight(float s, float scale, float lse) {
  const float log = fmaf(scale, s, -lse);
  return exp2_fast(std::is_same_v<T, float> ? log * kLog2E : log);
}

// For a lane's two of 16 rows: the largest product so far, m, and the lane's part of sum e^{scale (s - m)}.
template <typename T>
struct CatSoftmax {
  // Less than any product that is not masked, so that masked scores give 0.
  float largest[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f};

  // s <- e^{scale (s - m')}, m' = max(m, s). Returns the factors for the values summed before.
  template <int N>
  __device__ float2 add(Accumulator<N>& s, const CatScale& scale) {
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float new_max = largest[i];
#pragma unroll
      for (int n = 0; n < N; ++n) new_max = fmaxf(new_max, fmaxf(s.at[n][2 * i], s.at[n][2 * i + 1]));
      new_max = max_over_row(new_max);
      by[i] = exp2_fast((largest[i] - new_max) * scale.log2_scale);
      largest[i] = new_max, sum[i] *= by[i];
      const float scaled_max = new_max * scale.log2_scale;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float &x = s.at[n][2 * i], &y = s.at[n][2 * i + 1];
        if constexpr (std::is_same_v<T, float>) {  // for large scores, base would be rounded
          x = exp2_fast((x - new_max) * scale.log2_scale), y = exp2_fast((y - new_max) * scale.log2_scale);
        } else {
          x = exp2_fast(fmaf(x, scale.log2_scale, -scaled_max)),
          y = exp2_fast(fmaf(y, scale.log2_scale, -scaled_max));
        }
        sum[i] += x + y;
      }
    }
    return {by[0], by[1]};
  }

  // log sum e^{scale s}; whole: the sum over the four lanes of the row.
  __device__ float log_sum(int i, float whole, const CatScale& scale) const {
    return fmaf(largest[i], scale.magnitude, logf(whole));
  }
};

// Scales the rows, unless all factors are 1: the maximum rarely changes after the first blocks.
template <int N>
__device__ inline void rescale_accumulator(Accumulator<N>& sums, float2 by) {
  if (__any_sync(~0u, by.x != 1.f || by.y != 1.f)) scale_rows(sums, by);
}

}  // namespace girih::kernels

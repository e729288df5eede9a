// Softmax over scores as they come.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

// scale q.k of sums of q.k: a factor above 0, in units of log2, and q's sign. So the largest sum is the
// largest score, and a masked one, -infinity, stays what it is: a scale of 0 is one too small to tell any two
// apart.
struct CatScale {
  float by;
  uint32_t sign;

  __device__ explicit CatScale(float scale)
      : by(fmaxf(fabsf(scale), 1e-37f) * kLog2E), sign(scale < 0.f ? 0x80008000u : 0u) {}
  __device__ void apply_sign(uint32_t (&q)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] ^= sign;
  }
};

// Of a lane's two rows of sixteen: the largest sum so far, m, and the lane's share in sum e^{scale (s - m)}.
struct CatSoftmax {
  // Less than any sum that is read: what is masked comes to 0 against it.
  float largest[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f};

  // s <- e^{scale (s - m')}, m' = max(m, s). What was summed before is to be multiplied by what this returns.
  template <int N>
  __device__ float2 add(Sums<N>& s, const CatScale& scale) {
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = largest[i];
#pragma unroll
      for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(s.at[n][2 * i], s.at[n][2 * i + 1]));
      most = max_over_row(most);
      by[i] = exp2_fast((largest[i] - most) * scale.by);
      largest[i] = most, sum[i] *= by[i];
      const float base = most * scale.by;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float &x = s.at[n][2 * i], &y = s.at[n][2 * i + 1];
        x = exp2_fast(fmaf(x, scale.by, -base)), y = exp2_fast(fmaf(y, scale.by, -base));
        sum[i] += x + y;
      }
    }
    return {by[0], by[1]};
  }

  // log sum e^{scale s}, of a row's whole sum.
  __device__ float log_sum(int i, float whole, const CatScale& scale) const {
    constexpr float kLn2 = 0.6931471805599453f;
    return largest[i] * scale.by * kLn2 + logf(whole);
  }
};

// Where any row's factor is not 1: the largest score is soon among those seen.
template <int N>
__device__ inline void scale_sums(Sums<N>& sums, float2 by) {
  if (__any_sync(~0u, by.x != 1.f || by.y != 1.f)) scale_rows(sums, by);
}

}  // namespace girih::kernels

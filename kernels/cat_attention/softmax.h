// Softmax over scores as they come.
#pragma once

#include <type_traits>

#include "tile/matrix.h"

namespace girih::kernels {

// scale q.k of sums of q.k: a factor above 0, in units of log2, and q's sign. So the largest sum is the
// largest score, and a masked one, -infinity, stays what it is: a scale of 0 is one too small to tell any two
// apart.
struct CatScale {
  float natural, by;  // without the sign: as it is, and in units of log2
  uint32_t sign;      // of two 16-bit numbers; the upper one is an fp32 number's

  __device__ explicit CatScale(float scale)
      : natural(fmaxf(fabsf(scale), 1e-37f)), by(natural * kLog2E), sign(scale < 0.f ? 0x80008000u : 0u) {}
  __device__ void apply_sign(uint32_t (&q)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] ^= sign;
  }
};

// Backward's e^{scale s - lse}, of a scale and an lse that are kCatUnit as large. Elements of 16 bits have
// them in units of log2, and a weight is two instructions. fp32 has them as they are: the difference is small
// where the weight is not, and errs no more than lse does.
template <typename T>
constexpr float kCatUnit = std::is_same_v<T, float> ? 1.f : kLog2E;
template <typename T>
__device__ inline float cat_weight(float s, float scale, float lse) {
  const float log = fmaf(scale, s, -lse);
  return exp2_fast(std::is_same_v<T, float> ? log * kLog2E : log);
}

// Of a lane's two rows of sixteen: the largest sum so far, m, and the lane's share in sum e^{scale (s - m)}.
template <typename T>
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
        if constexpr (std::is_same_v<T, float>) {  // of large scores the base would be rounded
          x = exp2_fast((x - most) * scale.by), y = exp2_fast((y - most) * scale.by);
        } else {
          x = exp2_fast(fmaf(x, scale.by, -base)), y = exp2_fast(fmaf(y, scale.by, -base));
        }
        sum[i] += x + y;
      }
    }
    return {by[0], by[1]};
  }

  // log sum e^{scale s}, of a row's whole sum.
  __device__ float log_sum(int i, float whole, const CatScale& scale) const {
    return fmaf(largest[i], scale.natural, logf(whole));
  }
};

// Where any row's factor is not 1: the largest score is soon among those seen.
template <int N>
__device__ inline void scale_sums(Sums<N>& sums, float2 by) {
  if (__any_sync(~0u, by.x != 1.f || by.y != 1.f)) scale_rows(sums, by);
}

}  // namespace girih::kernels

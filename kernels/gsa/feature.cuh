// p = feature(scale * x), rows of logits spread over the four lanes of a row, and its gradient.
#pragma once

#include "gsa/gsa.h"
#include "tile/matrix.h"

namespace girih::kernels {

// x becomes p times the row's divisor: softmax leaves its sums out of p, `divisor` is what to multiply by
// (rows lane_row() and lane_row() + 8); 1 elsewhere. Slots from `slots` on do not exist.
template <int N>
__device__ inline void apply(Sums<N>& x, Feature feature, float scale, int slots, float2& divisor) {
  divisor = {1.f, 1.f};
  if (feature == Feature::softmax) {
    if (scale < 0.f) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x.at[n][i] = -x.at[n][i];
      }
    }
    const float factor = fmaxf(kLog2E * fabsf(scale), 1e-30f);  // never 0: times -inf it is -inf
    if (slots < 8 * N) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * n + lane_col() + (i & 1) >= slots) x.at[n][i] = -INFINITY;
        }
      }
    }
    float above = -INFINITY, below = -INFINITY;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      above = fmaxf(above, fmaxf(x.at[n][0], x.at[n][1]));
      below = fmaxf(below, fmaxf(x.at[n][2], x.at[n][3]));
    }
    above = factor * max_over_row(above);
    below = factor * max_over_row(below);
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = x.at[n][i];
        value = exp2_fast(fmaf(value, factor, -(i < 2 ? above : below)));
        (i < 2 ? sum.x : sum.y) += value;
      }
    }
    divisor = {1.f / sum_over_row(sum.x), 1.f / sum_over_row(sum.y)};
    return;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& value = x.at[n][i];
      value *= scale;
      if (feature == Feature::silu) {
        value = __fdividef(value, 1.f + exp2_fast(-kLog2E * value));
      } else if (feature == Feature::relu) {
        value = fmaxf(value, 0.f);
      } else if (feature == Feature::relu2) {
        value = fmaxf(value, 0.f) * fmaxf(value, 0.f);
      }
    }
  }
}

// The gradient of apply(). z and dp = dL/dp come without what rows read of their own tokens, which is score *
// weight: own_z, own_dp are the scores of rows lane_row() and lane_row() + 8, weight(n, i) the weights of row
// lane_row() + 8 i, columns 8 n + lane_col() and the next. z becomes p (all of it), dp becomes scale * dL/dz
// of the logits as they were; write(n, i, left, right) gets z dL/dz + p dL/dp without own tokens, z scaled.
template <int N, class Weight, class Write>
__device__ inline void differentiate(Sums<N>& z, Sums<N>& dp, float2 own_z, float2 own_dp,
                                     const Weight& weight, Feature feature, float scale, int slots,
                                     const Write& write) {
  own_z.x *= scale, own_z.y *= scale;
  // f(n, i, what a row reads of its own token: of z, of dp) of every element.
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 w = weight(n, i);
        const float of_z = i ? own_z.y : own_z.x, of_dp = i ? own_dp.y : own_dp.x;
        f(n, 2 * i, of_z * w.x, of_dp * w.x);
        f(n, 2 * i + 1, of_z * w.y, of_dp * w.y);
      }
    }
  };
  each([&](int n, int i, float of_z, float of_dp) {
    z.at[n][i] = fmaf(z.at[n][i], scale, of_z);
    dp.at[n][i] += of_dp;
  });
  // derivative(z, dp, row) = (p, dL/dz)
  const auto finish = [&](const auto& derivative) {
    asm volatile("" ::: "memory");  // read the weights again: there are no registers to keep them
    float left = 0.f;
    each([&](int n, int i, float of_z, float of_dp) {
      const float x = z.at[n][i], given = dp.at[n][i];
      const float2 result = derivative(x, given, i >> 1);
      const float w = (x - of_z) * result.y + result.x * (given - of_dp);
      z.at[n][i] = result.x;
      dp.at[n][i] = scale * result.y;
      if (i % 2 == 1) write(n, i >> 1, left, w);
      left = w;
    });
  };
  switch (feature) {
    case Feature::softmax: {
      if (slots < 8 * N) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (8 * n + lane_col() + (i & 1) >= slots) z.at[n][i] = -1e30f;  // p = 0, and 0 z = 0
          }
        }
      }
      float2 top = {-INFINITY, -INFINITY}, sum = {0.f, 0.f}, delta = {0.f, 0.f};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        top.x = fmaxf(top.x, fmaxf(z.at[n][0], z.at[n][1]));
        top.y = fmaxf(top.y, fmaxf(z.at[n][2], z.at[n][3]));
      }
      top = {kLog2E * max_over_row(top.x), kLog2E * max_over_row(top.y)};
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = exp2_fast(fmaf(kLog2E, z.at[n][i], -(i < 2 ? top.x : top.y)));
          (i < 2 ? sum.x : sum.y) += p;
          (i < 2 ? delta.x : delta.y) += p * dp.at[n][i];
        }
      }
      sum = {sum_over_row(sum.x), sum_over_row(sum.y)};
      delta = {sum_over_row(delta.x) / sum.x, sum_over_row(delta.y) / sum.y};
      const float2 shift = {top.x + __log2f(sum.x), top.y + __log2f(sum.y)};
      return finish([&](float x, float given, int row) -> float2 {
        const float p = exp2_fast(fmaf(kLog2E, x, -(row ? shift.y : shift.x)));
        return {p, p * (given - (row ? delta.y : delta.x))};
      });
    }
    case Feature::none:
      return finish([](float x, float given, int) -> float2 { return {x, given}; });
    case Feature::silu:
      return finish([](float x, float given, int) -> float2 {
        const float sigmoid = __fdividef(1.f, 1.f + exp2_fast(-kLog2E * x));
        return {x * sigmoid, given * sigmoid * (1.f + x * (1.f - sigmoid))};
      });
    case Feature::relu:
      return finish([](float x, float given, int) -> float2 {
        return {fmaxf(x, 0.f), x > 0.f ? given : 0.f};
      });
    case Feature::relu2:
      return finish([](float x, float given, int) -> float2 {
        const float positive = fmaxf(x, 0.f);
        return {positive * positive, 2.f * positive * given};
      });
  }
}

}  // namespace girih::kernels

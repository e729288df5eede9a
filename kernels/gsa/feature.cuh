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
    scale *= kLog2E;
    float above = -INFINITY, below = -INFINITY;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = x.at[n][i];
        value = 8 * n + lane_col() + (i & 1) < slots ? value * scale : -INFINITY;
        (i < 2 ? above : below) = fmaxf(i < 2 ? above : below, value);
      }
    }
    above = max_over_row(above);
    below = max_over_row(below);
    float2 sum = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = x.at[n][i];
        value = exp2_fast(value - (i < 2 ? above : below));
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
        value = value / (1.f + exp2_fast(-kLog2E * value));
      } else if (feature == Feature::relu) {
        value = fmaxf(value, 0.f);
      } else if (feature == Feature::relu2) {
        value = fmaxf(value, 0.f) * fmaxf(value, 0.f);
      }
    }
  }
}

// The gradient of apply(). z becomes p (all of it), dp = dL/dp becomes scale * dL/dz; with z the scaled
// logits, write(n, i, left, right) gets z dL/dz + p dL/dp of row lane_row() + 8 i, columns 8 n + lane_col()
// and the next.
template <int N, class Write>
__device__ inline void differentiate(Sums<N>& z, Sums<N>& dp, Feature feature, float scale, int slots,
                                     const Write& write) {
  float2 shift = {0.f, 0.f}, delta = {0.f, 0.f};  // softmax: log2 of the divisor, sum of p dp
  if (feature == Feature::softmax) {
    float2 top = {-INFINITY, -INFINITY}, sum = {0.f, 0.f};
    const auto exists = [&](int n, int i) { return 8 * n + lane_col() + (i & 1) < slots; };
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        z.at[n][i] *= scale;
        if (exists(n, i)) (i < 2 ? top.x : top.y) = fmaxf(i < 2 ? top.x : top.y, z.at[n][i]);
      }
    }
    top = {kLog2E * max_over_row(top.x), kLog2E * max_over_row(top.y)};
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!exists(n, i)) continue;
        const float p = exp2_fast(kLog2E * z.at[n][i] - (i < 2 ? top.x : top.y));
        (i < 2 ? sum.x : sum.y) += p;
        (i < 2 ? delta.x : delta.y) += p * dp.at[n][i];
      }
    }
    sum = {sum_over_row(sum.x), sum_over_row(sum.y)};
    delta = {sum_over_row(delta.x) / sum.x, sum_over_row(delta.y) / sum.y};
    shift = {top.x + __log2f(sum.x), top.y + __log2f(sum.y)};
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) z.at[n][i] *= scale;
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = z.at[n][i], given = dp.at[n][i];
      float p = x, dz = given;
      if (feature == Feature::softmax) {
        p = 8 * n + lane_col() + (i & 1) < slots ? exp2_fast(kLog2E * x - (i < 2 ? shift.x : shift.y)) : 0.f;
        dz = p * (given - (i < 2 ? delta.x : delta.y));
      } else if (feature == Feature::silu) {
        const float sigmoid = 1.f / (1.f + exp2_fast(-kLog2E * x));
        p = x * sigmoid;
        dz = given * sigmoid * (1.f + x * (1.f - sigmoid));
      } else if (feature == Feature::relu) {
        p = fmaxf(x, 0.f);
        dz = x > 0.f ? given : 0.f;
      } else if (feature == Feature::relu2) {
        p = fmaxf(x, 0.f) * fmaxf(x, 0.f);
        dz = 2.f * fmaxf(x, 0.f) * given;
      }
      w[i] = x * dz + p * given;
      z.at[n][i] = p;
      dp.at[n][i] = scale * dz;
    }
    write(n, 0, w[0], w[1]);
    write(n, 1, w[2], w[3]);
  }
}

}  // namespace girih::kernels

// p = feature(scale * x) and its gradient. x: rows of logits [M], each distributed over the four lanes of a
// row.
#pragma once

#include "gsa/gsa.h"
#include "tile/matrix.h"

namespace girih::kernels {

// Sets x = value in the padding slots, from `slots`.
template <int N>
__device__ inline void mask_padding_slots(Accumulator<N>& x, int slots, float value) {
  if (slots >= 8 * N) return;
  for_each_register<N>([&](int n, int i) {
    if (8 * n + lane_col() + (i & 1) >= slots) x.at[n][i] = value;
  });
}

// The largest logits of rows lane_row() and lane_row() + 8.
template <int N>
__device__ inline float2 row_max(const Accumulator<N>& x) {
  float2 max_logit = {-INFINITY, -INFINITY};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    max_logit.x = fmaxf(max_logit.x, fmaxf(x.at[n][0], x.at[n][1]));
    max_logit.y = fmaxf(max_logit.y, fmaxf(x.at[n][2], x.at[n][3]));
  }
  return {max_over_row(max_logit.x), max_over_row(max_logit.y)};
}

// Replaces x by p, for softmax without the division: then x holds the exponentials, and p = inverse_sum * x
// for rows lane_row() and lane_row() + 8. For the other features inverse_sum is 1. Slots from `slots` are
// padding.
template <int N>
__device__ inline void apply_feature(Accumulator<N>& x, Feature feature, float scale, int slots,
                                     float2& inverse_sum) {
  inverse_sum = {1.f, 1.f};
  if (feature == Feature::softmax) {
    if (scale < 0.f) {
      for_each_register<N>([&](int n, int i) { x.at[n][i] = -x.at[n][i]; });
    }
    const float factor = fmaxf(kLog2E * fabsf(scale), 1e-30f);  // not 0: 0 * -inf is NaN
    mask_padding_slots(x, slots, -INFINITY);
    const float2 largest = row_max(x), max_logit = {factor * largest.x, factor * largest.y};
    float2 sum = {0.f, 0.f};
    for_each_register<N>([&](int n, int i) {
      float& value = x.at[n][i];
      value = exp2_fast(fmaf(value, factor, -(i < 2 ? max_logit.x : max_logit.y)));
      (i < 2 ? sum.x : sum.y) += value;
    });
    inverse_sum = {1.f / sum_over_row(sum.x), 1.f / sum_over_row(sum.y)};
    return;
  }
  for_each_register<N>([&](int n, int i) {
    float& value = x.at[n][i];
    value *= scale;
    if (feature == Feature::silu) {
      value = __fdividef(value, 1.f + exp2_fast(-kLog2E * value));
    } else if (feature == Feature::relu) {
      value = fmaxf(value, 0.f);
    } else if (feature == Feature::relu2) {
      value = fmaxf(value, 0.f) * fmaxf(value, 0.f);
    }
  });
}

// Sums of a row for softmax, with the exponentials e_m = e^{z_m - max z}: log2(e) max z, sum e_m, and sum e_m
// dp_m. Rows lane_row() and lane_row() + 8.
struct SoftmaxSums {
  float2 max_logit, sum, delta;
};

// The gradient of apply_feature(). z and dp = dL/dp do not contain the read of the row's own token, which is
// score * weight: own_z and own_dp are the scores of rows lane_row() and lane_row() + 8, and weight(n, i)
// returns the weights of row lane_row() + 8 i, columns 8 n + lane_col() and the next. z and own_z do not
// contain scale.
//
// Calls store(n, i, z, dp, p, dz) for each pair, with z scaled, z and dp without own tokens, and dz = scale *
// dL/dz. store() may change p and dz; the results replace z and dp. If other warps have other columns of the
// rows, join(sums) adds their sums.
template <int N, class Weight, class Join, class Store>
__device__ inline void differentiate_feature(Accumulator<N>& z, Accumulator<N>& dp, float2 own_z,
                                             float2 own_dp, const Weight& weight, Feature feature,
                                             float scale, int slots, const Join& join, const Store& store) {
  own_z.x *= scale, own_z.y *= scale;
  // Calls f(n, i, own term of z, own term of dp) for each pair.
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 w = weight(n, i);
        const float self_z = i ? own_z.y : own_z.x, self_dp = i ? own_dp.y : own_dp.x;
        f(n, i, float2{self_z * w.x, self_z * w.y}, float2{self_dp * w.x, self_dp * w.y});
      }
    }
  };
  each([&](int n, int i, float2 self_z, float2 self_dp) {
    z.at[n][2 * i] = fmaf(z.at[n][2 * i], scale, self_z.x);
    z.at[n][2 * i + 1] = fmaf(z.at[n][2 * i + 1], scale, self_z.y);
    dp.at[n][2 * i] += self_dp.x, dp.at[n][2 * i + 1] += self_dp.y;
  });
  // derivative(z, dp, row) returns (p, dL/dz).
  const auto finish = [&](const auto& derivative) {
    ptx::fence_compiler();  // forces a second load of the weights, which have no registers
    each([&](int n, int i, float2 self_z, float2 self_dp) {
      float &left = z.at[n][2 * i], &right = z.at[n][2 * i + 1];
      float &dp_left = dp.at[n][2 * i], &dp_right = dp.at[n][2 * i + 1];
      const float2 one = derivative(left, dp_left, i), two = derivative(right, dp_right, i);
      float2 p = {one.x, two.x}, dz = {scale * one.y, scale * two.y};
      store(n, i, float2{left - self_z.x, right - self_z.y},
            float2{dp_left - self_dp.x, dp_right - self_dp.y}, p, dz);
      left = p.x, right = p.y;
      dp_left = dz.x, dp_right = dz.y;
    });
  };
  if (feature == Feature::softmax) {
    mask_padding_slots(z, slots, -1e30f);  // so that p = 0 and 0 z = 0
    const float2 largest = row_max(z), max_logit = {kLog2E * largest.x, kLog2E * largest.y};
    float2 sum = {0.f, 0.f}, delta = {0.f, 0.f};
    for_each_register<N>([&](int n, int i) {
      const float p = exp2_fast(fmaf(kLog2E, z.at[n][i], -(i < 2 ? max_logit.x : max_logit.y)));
      (i < 2 ? sum.x : sum.y) += p;
      (i < 2 ? delta.x : delta.y) += p * dp.at[n][i];
    });
    SoftmaxSums row = {max_logit,
                       {sum_over_row(sum.x), sum_over_row(sum.y)},
                       {sum_over_row(delta.x), sum_over_row(delta.y)}};
    join(row);
    delta = {row.delta.x / row.sum.x, row.delta.y / row.sum.y};
    const float2 shift = {row.max_logit.x + __log2f(row.sum.x), row.max_logit.y + __log2f(row.sum.y)};
    return finish([&](float x, float grad, int row) -> float2 {
      const float p = exp2_fast(fmaf(kLog2E, x, -(row ? shift.y : shift.x)));
      return {p, p * (grad - (row ? delta.y : delta.x))};
    });
  }
  // One loop with branches for the other features: with one loop each, these loops were most of the kernel's
  // code.
  finish([&](float x, float grad, int) -> float2 {
    if (feature == Feature::none) return {x, grad};
    if (feature == Feature::silu) {
      const float sigmoid = __fdividef(1.f, 1.f + exp2_fast(-kLog2E * x));
      return {x * sigmoid, grad * sigmoid * (1.f + x * (1.f - sigmoid))};
    }
    const float positive = fmaxf(x, 0.f);
    if (feature == Feature::relu) return {positive, x > 0.f ? grad : 0.f};
    return {positive * positive, 2.f * positive * grad};
  });
}

}  // namespace girih::kernels

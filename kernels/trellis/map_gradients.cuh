// Products of backward with the Jacobian J of phi or f, with J^T, and with the Hessian of E (maps.cuh). A
// function with an argument `half` computes row lane_row() + 8 half. "By y" and "by z" stand for derivatives
// with respect to y and to z.
#pragma once

#include "trellis/maps.cuh"

namespace girih::kernels {

// P x = x - mean of x with a mean, else x. In the formulas n = (y - mean) / r, and p = phi for softmax.

// Sums of a row for products of J and of the Hessian with a vector x, where x' = slope x: (x', (y - mean) x',
// (a - mean) x'); softmax: (p x, p^2 x, p a x). These are the lane's terms; x is 0 in padding slots.
template <class Map, int N>
__device__ inline float3 compute_jacobian_sums(const Map& map, const Accumulator<N>& x,
                                               const Accumulator<N>& y, const Accumulator<N>& slope,
                                               const Accumulator<N>& a, const MapStats& f, int half) {
  float3 sum{0.f, 0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float factor = Map::softmax ? softmax_of(map, f, y.at[n][i]) : slope.at[n][i];
      const float own = __fmul_rn(factor, x.at[n][i]);
      sum.x += own;
      sum.y = fmaf(Map::softmax ? factor : y.at[n][i] - f.mean, own, sum.y);
      sum.z = fmaf(Map::softmax ? a.at[n][i] : a.at[n][i] - f.mean_a, own, sum.z);
    }
  }
  return sum;
}
// With a weight and c = y - mean: (x', c x', (2 w^2 c / r - b + mean_a) x', w^2 x').
template <int N>
__device__ inline float4 compute_weighted_jacobian_sums(const Accumulator<N>& x, const Accumulator<N>& y,
                                                        const Accumulator<N>& slope, const Accumulator<N>& b,
                                                        const Weights<N>& w, const MapStats& f, int half) {
  float4 sum{0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float own = __fmul_rn(slope.at[n][i], x.at[n][i]), c = y.at[n][i] - f.mean,
                  square = w.square_of(n, i);
      sum.x += own;
      sum.y = fmaf(c, own, sum.y);
      sum.z = fmaf(fmaf(2.f * square * f.inverse, c, f.mean_a - b.at[n][i]), own, sum.z);
      sum.w = __fadd_rn(sum.w, __fmul_rn(square, own));
    }
  }
  return sum;
}
// Sums of both rows over the quad; a lane gets the sums of row lane_row() + 8 (lane() % 2).
__device__ inline float3 reduce_rows(const float3 (&rows)[2]) {
  const bool upper = lane() & 1;
  const auto sum = [&](float first, float second) {
    const float own = (upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, 1);
    return own + __shfl_xor_sync(~0u, own, 2);
  };
  return {sum(rows[0].x, rows[1].x), sum(rows[0].y, rows[1].y), sum(rows[0].z, rows[1].z)};
}
// The inverse of reduce_rows(): every lane gets the values of both rows.
__device__ inline void exchange_rows(float3 (&rows)[2], const float3& own) {
  const bool upper = lane() & 1;
  const float3 other = {__shfl_xor_sync(~0u, own.x, 1), __shfl_xor_sync(~0u, own.y, 1),
                        __shfl_xor_sync(~0u, own.z, 1)};
  rows[0] = upper ? other : own, rows[1] = upper ? own : other;
}

__device__ inline float4 reduce_rows(const float4 (&rows)[2]) {
  const float3 parts[2] = {{rows[0].x, rows[0].y, rows[0].z}, {rows[1].x, rows[1].y, rows[1].z}};
  const float3 rest[2] = {{rows[0].w, 0.f, 0.f}, {rows[1].w, 0.f, 0.f}};
  const float3 sum = reduce_rows(parts);
  return {sum.x, sum.y, sum.z, reduce_rows(rest).x};
}
__device__ inline void exchange_rows(float4 (&rows)[2], const float4& own) {
  float3 parts[2];
  exchange_rows(parts, {own.x, own.y, own.z});
  const float other = __shfl_xor_sync(~0u, own.w, 1);
  const bool upper = lane() & 1;
  rows[0] = {parts[0].x, parts[0].y, parts[0].z, upper ? other : own.w};
  rows[1] = {parts[1].x, parts[1].y, parts[1].z, upper ? own.w : other};
}

// Replaces the second derivative slope' by slope' t with t = grad E by y: the term of silu in the Hessian.
template <int N>
__device__ inline void compute_curvature_term(Accumulator<N>& curvature, const Accumulator<N>& y,
                                              const Accumulator<N>& a, const MapStats& f, int half) {
  const Residual residual(f);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) curvature.at[n][i] *= residual(y.at[n][i], a.at[n][i]);
  }
}

template <int N>
__device__ inline void compute_weighted_curvature_term(Accumulator<N>& curvature, const Accumulator<N>& y,
                                                       const Accumulator<N>& b, const Weights<N>& w,
                                                       const MapStats& f, int half) {
  const WeightedResidual residual(f);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      curvature.at[n][i] *= residual(y.at[n][i], b.at[n][i], w.square_of(n, i));
    }
  }
}

// Replaces x by the product of the Hessian of E at z with x; padding slots get finite values. With n = (y -
// mean) / r, alpha = n.x' / N, omega = (phi - a).P x' / N, nu = |n|^2 / N:
//     by y   h = ((1 - beta) P x' - alpha P (phi - a) + n (3 alpha beta - omega - alpha (2 - nu))) / r^2
//     by z   slope h + slope' t x         t = grad E by y
// softmax, w = p - a:   p * (w x + J x / p - p.(w x + J x) - (p.x) (w - p.w) - (p.w) (x - p.x))
template <class Map, int N>
__device__ inline void apply_hessian(const Map& map, Accumulator<N>& x, const Accumulator<N>& y,
                                     const Accumulator<N>& slope, const Accumulator<N>& curvature_term,
                                     const Accumulator<N>& a, const MapStats& f, float3 sums, int half) {
  const float r = f.inverse, r2 = r * r;
  const float alpha = sums.y * r * map.norm_factor, omega = alpha - sums.z * map.norm_factor;
  const float nu = 1.f - kMapEps * r2, n_factor = 3.f * alpha * f.beta - omega - alpha * (2.f - nu);
  const float h1 = (1.f - f.beta) * r2, h2 = (n_factor - alpha) * r2 * r, h3 = alpha * r2,
              mean_x = sums.x * map.mean_factor;
  const float pw = f.beta - f.mean_a, px = sums.x, py = 2.f * sums.y - sums.z - px * f.beta;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float own = x.at[n][i], at = y.at[n][i], target = a.at[n][i];
      float result;
      if constexpr (Map::softmax) {
        const float p = softmax_of(map, f, at), w = p - target;
        result = p * (w * own + p * (own - px) - py - px * (w - pw) - pw * (own - px));
      } else {
        // Rounded as in compute_jacobian_sums(), so that the difference is 0 for a row of one slot.
        const float d = slope.at[n][i], by_y = fmaf(h1, __fmul_rn(d, own) - mean_x,
                                                    fmaf(h2, at - f.mean, h3 * (target - f.mean_a)));
        result = fmaf(curvature_term.at[n][i], own, d * by_y);
      }
      x.at[n][i] = result;
    }
  }
}

// The same with a weight. Also computes w J x in `weighted_jx`, and adds the sum over both rows of (2 w n -
// a) J x to dw, by slot. `sums` come from compute_weighted_jacobian_sums(). With g = grad E by y, j = J x =
// (P x' - n alpha) / r, e as in MapStats, s = n.e / N:
//     ds = (j.e + n.(w^2 j)) / N        by y    (P (w^2 j) - s j - n ds - alpha g) / r
template <class Map, int N>
__device__ inline void apply_weighted_hessian(const Map& map, Accumulator<N>& x, Accumulator<N>& weighted_jx,
                                              float (&dw)[N][2], const Accumulator<N>& y,
                                              const Accumulator<N>& slope,
                                              const Accumulator<N>& curvature_term, const Accumulator<N>& a,
                                              const Weights<N>& w, const MapStats& f,
                                              const float4& weighted_stats, const float4& sums, int half) {
  const WeightedResidual residual(f);
  const float r = f.inverse, s = f.beta, alpha = sums.y * r * map.norm_factor,
              mean_x = sums.x * map.mean_factor;
  const float ds =
      r * (fmaf(-mean_x, weighted_stats.x, sums.z) * map.norm_factor - alpha * (s + weighted_stats.y));
  const float sum_ww_px = __fadd_rn(sums.w, -__fmul_rn(mean_x, w.square));  // sum of w^2 P x'
  const float mean_de = map.mean_factor * r * fmaf(-alpha, weighted_stats.x, sum_ww_px);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float own = x.at[n][i], d = slope.at[n][i], weight = w.of(n, i), square = weight * weight,
                  image = (y.at[n][i] - f.mean) * r;
      const float j = fmaf(-image, alpha, __fmul_rn(d, own) - mean_x) * r;
      const float g = residual(y.at[n][i], weight * a.at[n][i], square);
      const float by_y = r * (fmaf(square - s, j, -mean_de) - fmaf(image, ds, alpha * g));
      dw[n][i & 1] = fmaf(fmaf(2.f * weight, image, -a.at[n][i]), j, dw[n][i & 1]);
      weighted_jx.at[n][i] = weight * j;
      x.at[n][i] = fmaf(curvature_term.at[n][i], own, d * by_y);
    }
  }
}

// Replaces x by J x = (P x' - n (n.x') / N) / r; softmax: p * (x - p.x).
template <class Map, int N>
__device__ inline void apply_jacobian(const Map& map, Accumulator<N>& x, const Accumulator<N>& y,
                                      const Accumulator<N>& slope, const MapStats& f, float3 sums, int half) {
  const float r = f.inverse, alpha = sums.y * r * map.norm_factor, mean_x = sums.x * map.mean_factor;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float own = x.at[n][i], at = y.at[n][i];
      const float result = Map::softmax
                               ? softmax_of(map, f, at) * (own - sums.x)
                               : fmaf(-(at - f.mean) * r, alpha, __fmul_rn(slope.at[n][i], own) - mean_x) * r;
      x.at[n][i] = result;
    }
  }
}

// Replaces x by J^T x = slope * (P x - n (n.x) / N) / r; softmax: as J. The quad holds the whole row.
template <class Map, int N>
__device__ inline void apply_jacobian_transpose(const Map& map, Accumulator<N>& x, const Accumulator<N>& y,
                                                const Accumulator<N>& slope, const MapStats& f, int half,
                                                const MapSlots& map_slots) {
  float sum = 0.f, dot = 0.f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float factor = Map::softmax ? softmax_of(map, f, y.at[n][i]) : y.at[n][i] - f.mean;
      const float own = map_slots.has(n, i) ? x.at[n][i] : 0.f;
      sum += own, dot = fmaf(factor, own, dot);
    }
  }
  sum = sum_over_row(sum), dot = sum_over_row(dot);
  const float r = f.inverse, alpha = dot * r * map.norm_factor;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float own = x.at[n][i], at = y.at[n][i];
      const float result =
          Map::softmax ? softmax_of(map, f, at) * (own - dot)
                       : slope.at[n][i] * (own - sum * map.mean_factor - (at - f.mean) * r * alpha) * r;
      x.at[n][i] = map_slots.has(n, i) ? result : 0.f;
    }
  }
}

}  // namespace girih::kernels

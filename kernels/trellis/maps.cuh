// The maps of Trellis, phi and f, with the gradients that updates and backward take of them.
//
// With y = silu(z) or z, a norm n(y) and targets a, phi(z) = n(y), and E(z) = |phi(z) - a|^2 / 2:
//     u = grad E(z) = J^T (phi - a)        du reaches z by the Hessian of E, and a by -J.
// Of a row all of this hangs on a few sums. l2 and layer norm share one form: layer norm's means are 0 for
// l2, and without a norm the shares of the norm are.
#pragma once

#include "tile/matrix.h"
#include "trellis/trellis.h"

namespace girih::kernels {

constexpr float kMapEps = 1e-6f;

template <bool Softmax>
struct Map {
  static constexpr bool softmax = Softmax;
  bool silu, norm;
  float centre;  // 1 / M where a mean is taken off, else 0
  float unit;    // 1 / N: layer norm divides by the root of a mean, l2 by that of a sum; without a norm 0

  __device__ Map(TrellisMap map, int slots)
      : silu(map.silu),
        norm(map.norm == Norm::l2 || map.norm == Norm::layer),
        centre(map.norm == Norm::layer ? 1.f / slots : 0.f),
        unit(map.norm == Norm::layer ? 1.f / slots
             : map.norm == Norm::l2  ? 1.f
                                     : 0.f) {}
};

// f(the map): softmax, whose sums are others, is code of its own.
template <class F>
__device__ inline void with_map(TrellisMap map, int slots, const F& f) {
  if (map.norm == Norm::softmax) {
    f(Map<true>(map, slots));
  } else {
    f(Map<false>(map, slots));
  }
}

// Of an x that is no less than the smallest normal number.
__device__ inline float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float sigmoid(float z) { return reciprocal(1.f + exp2_fast(-kLog2E * z)); }

// y and its slope in z, where there is a silu; else z, and the slope is 1.
template <class Map, int N>
__device__ inline void activate(const Map& map, Sums<N>& y, Sums<N>& slope) {
  fill(slope, 1.f);
  if constexpr (!Map::softmax) {
    if (!map.silu) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float z = y.at[n][i], s = sigmoid(z);
        y.at[n][i] = z * s;
        slope.at[n][i] = fmaf(y.at[n][i], 1.f - s, s);
      }
    }
  }
}

// Which of a row's columns the warp's Sums are, and which exist.
struct Columns {
  int first, slots;
  __device__ bool has(int n, int i) const { return first + 8 * n + lane_col() + (i & 1) < slots; }
  template <int N>
  __device__ float count() const {
    return static_cast<float>(min(max(slots - first, 0), 8 * N));
  }
};

// What a part of a row's columns has of its sums. Else, of n columns: (mean of y, sum of (y - mean)^2, sum of
// a (y - mean), sum of a). Softmax: the largest y, then with e = e^{y - it} the sums of (e, e^2, a e).
using Moments = float4;

// Of rows lane_row() + 8 half, over the quad's columns: all four lanes get them. y and a are 0 where there is
// no column.
template <class Map, int N>
__device__ inline Moments moments_of(const Map&, const Sums<N>& y, const Sums<N>& a, int half,
                                     const Columns& columns) {
  float x = 0.f, xx = 0.f, ax = 0.f;
  if constexpr (Map::softmax) {
    // Of a lane without columns: of finite size, so that no difference is NaN.
    float most = -1e30f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) most = columns.has(n, i) ? fmaxf(most, y.at[n][2 * half + i]) : most;
    }
    most = max_over_row(most);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float e = columns.has(n, i) ? exp2_fast(kLog2E * (y.at[n][2 * half + i] - most)) : 0.f;
        x += e, xx = fmaf(e, e, xx), ax = fmaf(a.at[n][2 * half + i], e, ax);
      }
    }
    return {most, sum_over_row(x), sum_over_row(xx), sum_over_row(ax)};
  } else {
    // Against one of them: a mean far from 0 takes no digits of what y is about it.
    float sum_a = 0.f;
    const float about = __shfl_sync(~0u, y.at[0][2 * half], lane() & ~3);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float d = columns.has(n, i) ? y.at[n][2 * half + i] - about : 0.f, t = a.at[n][2 * half + i];
        x += d, xx = fmaf(d, d, xx), ax = fmaf(t, d, ax), sum_a += t;
      }
    }
    x = sum_over_row(x), xx = sum_over_row(xx), ax = sum_over_row(ax), sum_a = sum_over_row(sum_a);
    const float off = x * reciprocal(fmaxf(columns.count<N>(), 1.f));
    return {about + off, fmaf(-off, x, xx), fmaf(-off, sum_a, ax), sum_a};
  }
}

// The same of both rows at once: a lane gets those of row lane_row() + 8 (lane() % 2), with half as many
// shuffles.
template <class Map, int N>
__device__ inline Moments moments_of_rows(const Map&, const Sums<N>& y, const Sums<N>& a,
                                          const Columns& columns) {
  const bool upper = lane() & 1;
  float about[2], sums[2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (Map::softmax) {
      float most = -1e30f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) most = columns.has(n, i) ? fmaxf(most, y.at[n][2 * half + i]) : most;
      }
      about[half] = max_over_row(most);
    } else {
      about[half] = __shfl_sync(~0u, y.at[0][2 * half], lane() & ~3);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float off = y.at[n][2 * half + i] - about[half], t = a.at[n][2 * half + i];
        const float x = columns.has(n, i) ? (Map::softmax ? exp2_fast(kLog2E * off) : off) : 0.f;
        sums[half][0] += x, sums[half][1] = fmaf(x, x, sums[half][1]);
        sums[half][2] = fmaf(t, x, sums[half][2]), sums[half][3] += t;
      }
    }
  }
  float own[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    own[i] = (upper ? sums[1][i] : sums[0][i]) + __shfl_xor_sync(~0u, upper ? sums[0][i] : sums[1][i], 1);
    own[i] += __shfl_xor_sync(~0u, own[i], 2);
  }
  const float at = upper ? about[1] : about[0];
  if constexpr (Map::softmax) {
    return {at, own[0], own[1], own[2]};
  } else {
    const float off = own[0] * reciprocal(fmaxf(columns.count<N>(), 1.f));
    return {at + off, fmaf(-off, own[0], own[1]), fmaf(-off, own[3], own[2]), own[3]};
  }
}

// What a row's sums come to. r = sqrt(variance + eps) of y, beta = n.(phi - a) / N. Softmax: (the largest y,
// 1 / sum of e, p.p, p.a).
struct Fit {
  float mean, inverse, beta, mean_a;
};

// Of the row's parts of 8 N columns each.
template <int N, int Parts, class Map>
__device__ inline Fit fit(const Map& map, const Moments (&parts)[Parts], int slots) {
  if constexpr (Map::softmax) {
    float most = parts[0].x, e = 0.f, ee = 0.f, ae = 0.f;
#pragma unroll
    for (int w = 1; w < Parts; ++w) most = fmaxf(most, parts[w].x);
#pragma unroll
    for (int w = 0; w < Parts; ++w) {
      const float by = exp2_fast(kLog2E * (parts[w].x - most));
      e = fmaf(parts[w].y, by, e), ee = fmaf(parts[w].z, by * by, ee), ae = fmaf(parts[w].w, by, ae);
    }
    const float inverse = reciprocal(e);
    return {most, inverse, ee * inverse * inverse, ae * inverse};
  } else {
    float mean = 0.f, sum_a = 0.f, square = 0.f, with_a = 0.f;
#pragma unroll
    for (int w = 0; w < Parts; ++w) {
      mean = fmaf(parts[w].x, Columns{8 * N * w, slots}.count<N>(), mean), sum_a += parts[w].w;
    }
    mean *= map.centre;
#pragma unroll
    for (int w = 0; w < Parts; ++w) {
      const float n = Columns{8 * N * w, slots}.count<N>(), off = n > 0.f ? parts[w].x - mean : 0.f;
      square += fmaf(n * off, off, parts[w].y), with_a += fmaf(parts[w].w, off, parts[w].z);
    }
    // Without a norm, where unit is 0, r is 1.
    const float variance = fmaxf(square * map.unit, 0.f),
                inverse = map.norm ? inverse_root(variance + kMapEps) : 1.f;
    return {mean, inverse, (variance * inverse - with_a * map.unit) * inverse, sum_a * map.centre};
  }
}
// Of both the quad's rows, from what each lane has of row lane_row() + 8 (lane() % 2).
__device__ inline void both_rows(Fit (&rows)[2], const Fit& own) {
  const bool upper = lane() & 1;
  const Fit other = {__shfl_xor_sync(~0u, own.mean, 1), __shfl_xor_sync(~0u, own.inverse, 1),
                     __shfl_xor_sync(~0u, own.beta, 1), __shfl_xor_sync(~0u, own.mean_a, 1)};
  rows[0] = upper ? other : own, rows[1] = upper ? own : other;
}

template <int N, class Map>
__device__ inline Fit fit(const Map& map, const Moments& whole, int slots) {
  const Moments parts[1] = {whole};
  return fit<N>(map, parts, slots);
}

// grad E by y, but for softmax: t = c (y - mean) - (a - mean of a) / r.
struct Residual {
  float c, inverse, mean, mean_a;
  __device__ explicit Residual(const Fit& f)
      : c(f.inverse * f.inverse * (1.f - f.beta)), inverse(f.inverse), mean(f.mean), mean_a(f.mean_a) {}
  __device__ float operator()(float y, float a) const { return fmaf(c, y - mean, inverse * (mean_a - a)); }
};

__device__ inline float softmax_of(const Fit& f, float y) {
  return exp2_fast(kLog2E * (y - f.mean)) * f.inverse;
}

// u of the row's part `half`, in the place of y.
template <class Map, int N>
__device__ inline void to_residual(const Map& map, Sums<N>& y, const Sums<N>& slope, const Sums<N>& a,
                                   const Fit& f, int half, const Columns& columns) {
  const Residual residual(f);
  const float mean = f.beta - f.mean_a;  // p.(p - a) of softmax
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      float u;
      if constexpr (Map::softmax) {
        const float p = softmax_of(f, y.at[n][i]);
        u = p * (p - a.at[n][i] - mean);
      } else {
        u = slope.at[n][i] * residual(y.at[n][i], a.at[n][i]);
      }
      y.at[n][i] = columns.has(n, i) ? u : 0.f;
    }
  }
}

// phi(z) from y, in its place.
template <class Map, int N>
__device__ inline void to_image(const Map& map, Sums<N>& y, const Fit& f, int half, const Columns& columns) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float image = Map::softmax ? softmax_of(f, y.at[n][i]) : (y.at[n][i] - f.mean) * f.inverse;
      y.at[n][i] = columns.has(n, i) ? image : 0.f;
    }
  }
}

}  // namespace girih::kernels

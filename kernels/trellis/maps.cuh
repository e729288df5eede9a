// The maps phi and f of Trellis, and the gradient u of the loss.
//
// With y = silu(z) or y = z, a norm n(y) and targets a: phi(z) = n(y), E(z) = |phi(z) - a|^2 / 2, and
//
//     u = grad E(z) = J^T (phi - a)        dz = (Hessian of E) du        da = -J du
//
// All of these need only a few sums over a row. l2 norm and layer norm share one formula: the means are 0 for
// l2 norm, and the terms of the norm are 0 without a norm.
//
// TTT's phi may have a weight w [M]: E(z) = |w * phi(z) - a|^2 / 2, and u = J^T (w * (w * phi - a)).
#pragma once

#include "pipe/rsqrt.h"
#include "tile/tf32.h"
#include "trellis/trellis.h"

namespace girih::kernels {

constexpr float kMapEps = 1e-6f;

// Fp32: full fp32 accuracy of roots, and of e^x in softmax.
template <bool Softmax, bool Fp32 = false>
struct ActivationMap {
  static constexpr bool softmax = Softmax, is_fp32 = Fp32, has_weight = false;
  static constexpr int kMoments = Softmax ? 4 : 3;  // sums of a row, see Moments
  bool silu, norm;
  float mean_factor;  // 1 / M if a mean is subtracted, else 0
  float norm_factor;  // 1 / N: N is M for layer norm and 1 for l2 norm; 0 without a norm. M: slots that exist

  __device__ ActivationMap(TrellisMap map, int slots)
      : silu(map.silu),
        norm(map.norm == Norm::l2 || map.norm == Norm::layer),
        mean_factor(map.norm == Norm::layer ? 1.f / slots : 0.f),
        norm_factor(map.norm == Norm::layer ? 1.f / slots
                    : map.norm == Norm::l2  ? 1.f
                                            : 0.f) {}
};

// A map with a silu and a norm, known at compile time.
struct SiluNormMap : ActivationMap<false> {
  static constexpr bool silu = true, norm = true;
  using ActivationMap<false>::ActivationMap;
};

// Any map but softmax, with a weight.
struct WeightedActivationMap : ActivationMap<false> {
  static constexpr bool has_weight = true;
  using ActivationMap<false>::ActivationMap;
};

// Calls f(map). Softmax has its own type, because its sums differ.
template <bool Fp32 = false, class F>
__device__ inline void dispatch_map(TrellisMap map, int slots, const F& f) {
  if (map.norm == Norm::softmax) {
    f(ActivationMap<true, Fp32>(map, slots));
  } else {
    f(ActivationMap<false, Fp32>(map, slots));
  }
}

__device__ inline float tanh_fast(float x) { return ptx::tanh_approx(x); }
// Sigmoid for a z with the accuracy of T. The error of tanh.approx, 2^-11, is an eighth of the rounding error
// of bf16, but equals that of fp16.
template <typename T>
__device__ inline float sigmoid(float z) {
  return reciprocal(1.f + exp2_fast(-kLog2E * z));
}
template <>
__device__ inline float sigmoid<__nv_bfloat16>(float z) {
  return fmaf(0.5f, tanh_fast(0.5f * z), 0.5f);
}
template <>
__device__ inline float sigmoid<float>(float z) {
  return 1.f / (1.f + expf(-z));
}

// Replaces z by y = silu(z) and computes its slope and, if requested, its second derivative.
template <typename T, int N>
__device__ inline void activate_silu(Accumulator<N>& y, Accumulator<N>& slope, Accumulator<N>* curvature) {
  for_each_register<N>([&](int n, int i) {
    const float z = y.at[n][i], s = sigmoid<T>(z), rest = 1.f - s;
    y.at[n][i] = z * s;
    slope.at[n][i] = fmaf(y.at[n][i], rest, s);
    // s (1 - s) (2 + z (1 - 2 s))
    if (curvature != nullptr) curvature->at[n][i] = s * rest * fmaf(-2.f, y.at[n][i], z + 2.f);
  });
}
// The same for any map. Without silu, y is z, its slope is 1 and its second derivative is 0. softmax has no
// silu.
template <typename T, class Map, int N>
__device__ inline void activate(const Map& map, Accumulator<N>& y, Accumulator<N>& slope,
                                Accumulator<N>* curvature = nullptr) {
  if constexpr (!Map::softmax) {
    if (map.silu) {
      activate_silu<T>(y, slope, curvature);
      return;
    }
  }
  fill(slope, 1.f);
  if (curvature != nullptr) fill(*curvature, 0.f);
}

// The slots of an Accumulator: its first slot, and the number of slots that exist. y and a are 0 in padding
// slots, so only the sums of softmax need to exclude padding.
struct MapSlots {
  int first, slots;
  __device__ bool has(int n, int i) const { return first + 8 * n + lane_col() + (i & 1) < slots; }
  // Bit mask of the existing slots of a pair.
  __device__ uint32_t pair_mask(int n) const {
    return (has(n, 0) ? 0xffffu : 0u) | (has(n, 1) ? 0xffff0000u : 0u);
  }
};

// Sums over a part of the slots of a row: the sums of y, y^2 and a y. Softmax: the largest y, and the sums of
// e, e^2 and a e with e = e^{y - largest y}. The variance comes from these sums in one pass, as sum of y^2 -
// mean * sum of y; the cancellation is acceptable, because z and so y have the accuracy of 16 bits.
using Moments = float4;

template <class M>
__device__ inline auto& component(M& moments, int moment) {
  return moment == 0 ? moments.x : moment == 1 ? moments.y : moment == 2 ? moments.z : moments.w;
}

// The largest y of a row over the quad. Finite even without slots, so that no difference is NaN.
template <int N>
__device__ inline float max_of_row(const Accumulator<N>& y, int half, const MapSlots& map_slots) {
  float max_y = -1e30f;
  for_each_register_pair<N>(
      [&](int n, int i) { max_y = map_slots.has(n, i) ? fmaxf(max_y, y.at[n][2 * half + i]) : max_y; });
  return max_over_row(max_y);
}

// Sums x (row lane_row()) and y (row lane_row() + 8) over the four lanes of a row, by a product with ones.
// Each number is split into a tf32 high part and a tf32 remainder (relative error 2^-22).
__device__ inline void sum_over_quads(float& x, float& y) {
  const uint32_t one = 0x3f800000u, mask = 0xffffe000u;
  const uint32_t high[2] = {__float_as_uint(x) & mask, __float_as_uint(y) & mask};
  const float low[2] = {x - __uint_as_float(high[0]), y - __uint_as_float(high[1])};
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  mma_tf32(sums, {high[0], high[1], __float_as_uint(low[0]), __float_as_uint(low[1])}, one, one);
  x = sums[0], y = sums[2];
}

// Moments of the quad's two rows over the slots of the quad, in all four lanes. rows[half] belongs to row
// lane_row() + 8 half.
template <class Map, int N>
__device__ inline void compute_moments(Moments (&rows)[2], const Map&, const Accumulator<N>& y,
                                       const Accumulator<N>& a, const MapSlots& map_slots) {
  float max_y[2] = {0.f, 0.f}, sums[3][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (Map::softmax) max_y[half] = max_of_row(y, half, map_slots);
    for_each_register_pair<N>([&](int n, int i) {
      const float target = a.at[n][2 * half + i];
      float x = y.at[n][2 * half + i];
      if constexpr (Map::softmax) x = map_slots.has(n, i) ? exp2_fast(kLog2E * (x - max_y[half])) : 0.f;
      const bool is_first = n == 0 && i == 0;
      sums[0][half] = is_first ? x : sums[0][half] + x;
      sums[1][half] = is_first ? x * x : fmaf(x, x, sums[1][half]);
      sums[2][half] = is_first ? target * x : fmaf(target, x, sums[2][half]);
    });
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) sum_over_quads(sums[i][0], sums[i][1]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = Map::softmax ? Moments{max_y[half], sums[0][half], sums[1][half], sums[2][half]}
                              : Moments{sums[0][half], sums[1][half], sums[2][half], 0.f};
  }
}

// Statistics of a row. r = sqrt(variance + eps), n = (y - mean) / r; with a weight e = w^2 n - w a, the
// gradient of E by n. N is the N of norm_factor. The fields hold:
//
//               mean         inverse                      beta               mean_a
//     norm      mean of y    1 / r                        n.(phi - a) / N    mean of a
//     weight    mean of y    1 / r                        n.e / N            -(mean of e)
//     softmax   largest y    1 / sum of e^{y - mean}      p.p                p.a             p = phi
//
// For l2 norm the means are 0. Without a norm r is 1, and beta and the means are 0.
struct MapStats {
  float mean, inverse, beta, mean_a;
};

// Statistics from the mean, the sums of (y - mean)^2 and a (y - mean), and the sum of a.
template <class Map>
__device__ inline MapStats stats_about_mean(const Map& map, float mean, float square, float sum_ay,
                                            float sum_a) {
  const auto inverse_of = [](float x) { return Map::is_fp32 ? rsqrt_accurate(x) : rsqrt_fast(x); };
  const float variance = fmaxf(square * map.norm_factor, 0.f),
              inverse = map.norm ? inverse_of(variance + kMapEps) : 1.f;
  return {mean, inverse, (variance * inverse - sum_ay * map.norm_factor) * inverse, sum_a * map.mean_factor};
}

// Statistics from the moments of the row's parts and the sum of its a.
template <int Parts, class Map>
__device__ inline MapStats compute_stats(const Map& map, const Moments (&parts)[Parts], float sum_a) {
  if constexpr (Map::softmax) {
    float max_y = parts[0].x, sum_e = 0.f, sum_ee = 0.f, sum_ae = 0.f;
#pragma unroll
    for (int w = 1; w < Parts; ++w) max_y = fmaxf(max_y, parts[w].x);
#pragma unroll
    for (int w = 0; w < Parts; ++w) {
      const float scale = exp2_fast(kLog2E * (parts[w].x - max_y));
      sum_e = fmaf(parts[w].y, scale, sum_e), sum_ee = fmaf(parts[w].z, scale * scale, sum_ee);
      sum_ae = fmaf(parts[w].w, scale, sum_ae);
    }
    const float inverse = reciprocal(sum_e);
    return {max_y, inverse, sum_ee * inverse * inverse, sum_ae * inverse};
  } else {
    float sum_y = parts[0].x, sum_yy = parts[0].y, sum_ay = parts[0].z;
#pragma unroll
    for (int w = 1; w < Parts; ++w) sum_y += parts[w].x, sum_yy += parts[w].y, sum_ay += parts[w].z;
    const float mean = sum_y * map.mean_factor;
    return stats_about_mean(map, mean, fmaf(-mean, sum_y, sum_yy), fmaf(-mean, sum_a, sum_ay), sum_a);
  }
}

// Statistics of row lane_row() + 8 half, which the quad holds completely, without the terms of a.
template <class Map, int N>
__device__ inline MapStats compute_row_stats_of_quad(const Map& map, const Accumulator<N>& y, int half,
                                                     const MapSlots& map_slots) {
  float max_y = 0.f, sum = 0.f, square = 0.f;
  if constexpr (Map::softmax) max_y = max_of_row(y, half, map_slots);
  for_each_register_pair<N>([&](int n, int i) {
    float x = y.at[n][2 * half + i];
    if constexpr (Map::softmax) x = map_slots.has(n, i) ? exp2_fast(kLog2E * (x - max_y)) : 0.f;
    sum += x, square = fmaf(x, x, square);
  });
  sum = sum_over_row(sum), square = sum_over_row(square);
  const Moments whole[1] = {{Map::softmax ? max_y : sum, Map::softmax ? sum : square, 0.f, 0.f}};
  return compute_stats(map, whole, 0.f);
}

// Gradient of E with respect to y, for all maps but softmax: c (y - mean) - (a - mean of a) / r, with c = (1
// - beta) / r^2.
struct Residual {
  float c, inverse, mean, mean_a;  // mean_a: the mean of a over r
  __device__ explicit Residual(const MapStats& f)
      : c(f.inverse * f.inverse * (1.f - f.beta)),
        inverse(f.inverse),
        mean(f.mean),
        mean_a(f.inverse * f.mean_a) {}
  __device__ float operator()(float y, float a) const { return fmaf(c, y - mean, fmaf(-inverse, a, mean_a)); }
};

template <class Map>
__device__ inline float softmax_of(const Map&, const MapStats& f, float y) {
  if constexpr (Map::is_fp32) return expf(y - f.mean) * f.inverse;
  return exp2_fast(kLog2E * (y - f.mean)) * f.inverse;
}

// Replaces y by u = slope * (gradient of E by y) in row lane_row() + 8 half; padding slots get finite values.
// 16-bit maps add the terms of both means first: y comes from a rounded z, so this loses no accuracy.
template <class Map, int N>
__device__ inline void compute_residual(const Map& map, Accumulator<N>& y, const Accumulator<N>& slope,
                                        const Accumulator<N>& a, const MapStats& f, int half) {
  const Residual residual(f);
  const float means = fmaf(-residual.c, residual.mean, residual.mean_a);
  const float mean = f.beta - f.mean_a;  // p.(p - a) of softmax
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      if constexpr (Map::softmax) {
        const float p = softmax_of(map, f, y.at[n][i]);
        y.at[n][i] = p * (p - a.at[n][i] - mean);
      } else if constexpr (Map::is_fp32) {
        y.at[n][i] = slope.at[n][i] * residual(y.at[n][i], a.at[n][i]);
      } else {
        y.at[n][i] =
            slope.at[n][i] * fmaf(residual.c, y.at[n][i], fmaf(-residual.inverse, a.at[n][i], means));
      }
    }
  }
}

// ---- a weight of phi -------------------------------------------------------------------------------------

// w of the lane's slots, 0 for padding, and the sum of w^2 over the row. Called by a whole warp.
template <int N>
struct Weights {
  float at[N][2], square;

  __device__ Weights(const float* row, const MapSlots& map_slots) : square(0.f) {
    for_each_register_pair<N>([&](int n, int i) {
      at[n][i] = map_slots.has(n, i) ? row[map_slots.first + 8 * n + lane_col() + i] : 0.f;
    });
    for (int m = lane(); m < map_slots.slots; m += 32) square = fmaf(row[m], row[m], square);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
  }
  __device__ float of(int n, int i) const { return at[n][i & 1]; }
  __device__ float square_of(int n, int i) const { return at[n][i & 1] * at[n][i & 1]; }
};
struct NoWeights {
  __device__ NoWeights(const float*, const MapSlots&) {}
};

// Replaces a by b = w a.
template <int N>
__device__ inline void multiply_by_weight(Accumulator<N>& a, const Weights<N>& w) {
  for_each_register<N>([&](int n, int i) { a.at[n][i] *= w.of(n, i); });
}
template <int N>
__device__ inline void multiply_by_weight(Accumulator<N>&, const NoWeights&) {}

// Sums over some slots of a row of w^2 y, w^2 y^2 and b. compute_moments() gets b as its a.
template <int N>
__device__ inline void compute_weighted_moments(Moments (&rows)[2], const Weights<N>& w,
                                                const Accumulator<N>& y, const Accumulator<N>& b) {
  float sums[3][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums[0][half] = sums[1][half] = sums[2][half] = 0.f;
    for_each_register_pair<N>([&](int n, int i) {
      const float x = y.at[n][2 * half + i], wwx = __fmul_rn(w.square_of(n, i), x);
      sums[0][half] += wwx, sums[1][half] = fmaf(wwx, x, sums[1][half]),
                            sums[2][half] += b.at[n][2 * half + i];
    });
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) sum_over_quads(sums[i][0], sums[i][1]);
#pragma unroll
  for (int half = 0; half < 2; ++half) rows[half] = {sums[0][half], sums[1][half], sums[2][half], 0.f};
}

// Further statistics of a row for backward: the sum of w^2 n, and the sum of w^2 n^2 / N.
using WeightedMapStats = float2;

// Statistics from the sums of compute_moments() and compute_weighted_moments(). `square` is the sum of w^2.
template <class Map>
__device__ inline MapStats compute_weighted_stats(const Map& map, const Moments& y, const Moments& weighted,
                                                  float square, WeightedMapStats& weighted_stats) {
  const float mean = y.x * map.mean_factor;
  const float variance = fmaxf(fmaf(-mean, y.x, y.y) * map.norm_factor, 0.f);
  const float inverse = map.norm ? rsqrt_fast(variance + kMapEps) : 1.f;
  // sums of w^2 n, w^2 n^2 and b n
  const float ww_mean = __fmul_rn(mean, square), wwn = (weighted.x - ww_mean) * inverse;
  const float wwnn =
      fmaxf(fmaf(-mean, weighted.x + (weighted.x - ww_mean), weighted.y), 0.f) * inverse * inverse;
  const float bn = fmaf(-mean, weighted.z, y.z) * inverse;
  weighted_stats = {wwn, wwnn * map.norm_factor};
  return {mean, inverse, (wwnn - bn) * map.norm_factor, (weighted.z - wwn) * map.mean_factor};
}

// Gradient of E with respect to y: (e - mean of e - n (n.e) / N) / r, e as in MapStats. b = w a.
struct WeightedResidual {
  float inverse, beta, mean, mean_a;
  __device__ explicit WeightedResidual(const MapStats& f)
      : inverse(f.inverse), beta(f.beta), mean(f.mean), mean_a(f.mean_a) {}
  __device__ float operator()(float y, float b, float square) const {
    return inverse * fmaf((square - beta) * inverse, y - mean, mean_a - b);
  }
};

// Replaces y by u, as compute_residual() without a weight.
template <int N>
__device__ inline void compute_weighted_residual(Accumulator<N>& y, const Accumulator<N>& slope,
                                                 const Accumulator<N>& b, const Weights<N>& w,
                                                 const MapStats& f, int half) {
  const WeightedResidual residual(f);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      y.at[n][i] = slope.at[n][i] * residual(y.at[n][i], b.at[n][i], w.square_of(n, i));
    }
  }
}

// ---- reads ----

// Replaces y by phi(z) in row lane_row() + 8 half.
template <class Map, int N>
__device__ inline void apply_map(const Map& map, Accumulator<N>& y, const MapStats& f, int half,
                                 const MapSlots& map_slots) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float image = Map::softmax ? softmax_of(map, f, y.at[n][i]) : (y.at[n][i] - f.mean) * f.inverse;
      y.at[n][i] = map_slots.has(n, i) ? image : 0.f;
    }
  }
}

// Replaces y by f(y) for 16 complete rows.
template <typename T, int N>
__device__ inline void apply_map_to_rows(TrellisMap map, int slots, Accumulator<N>& y) {
  const MapSlots map_slots{0, slots};
  dispatch_map(map, slots, [&](const auto& f) {
    Accumulator<N> slope;
    activate<T>(f, y, slope);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      apply_map(f, y, compute_row_stats_of_quad(f, y, half, map_slots), half, map_slots);
  });
}

}  // namespace girih::kernels

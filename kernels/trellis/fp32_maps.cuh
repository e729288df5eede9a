// The maps of a row of slots in fp32, by one warp (maps.cuh, map_gradients.cuh). Lane l has slots l, l + 32,
// ..., in pairs: half of the four elements of Accumulator<1>. It reloads the slots for every sum, because the
// matrix of the block leaves few registers.
#pragma once

#include "trellis/fp32_matrix.cuh"
#include "trellis/map_gradients.cuh"

namespace girih::kernels::trellis {

using SlotPair = Accumulator<1>;

// z before the norm of a map: y, its slope and its second derivative.
struct Activated {
  SlotPair y, slope, curvature;
};

// Statistics for targets whose mean is subtracted first: map.mean_a is 0, and mean_a is the mean of the
// targets. For a row of one slot the gradients are then exactly 0, not a rounding error times 1 / r.
struct CenteredStats {
  MapStats map;
  float mean_a;
};

template <class Sizes>
struct Fp32Row {
  static constexpr int kPairs = Sizes::Tile / 64, kUnroll = Sizes::Tile == 256 ? 1 : kPairs;
  const int slots;

  // Calls f(slot, index in the pair).
  template <class F>
  __device__ static void for_pair(int first, const F& f) {
    f(first, 0), f(first + 32, 1);
  }
  // Calls f(first slot of a pair) for all pairs of the lane.
  template <class F>
  __device__ static void each(const F& f) {
#pragma unroll kUnroll
    for (int n = 0; n < kPairs; ++n) f(64 * n + lane());
  }
  // Loads a pair; 0 for padding slots.
  __device__ SlotPair load(const float* row, int first) const {
    SlotPair x;
    fill(x, 0.f);
    for_pair(first, [&](int m, int i) { x.at[0][i] = m < slots ? row[m] : 0.f; });
    return x;
  }
  // Stores a pair; padding slots of a row get 0.
  __device__ void store(float* row, int first, const SlotPair& x) const {
    for_pair(first, [&](int m, int i) {
      if (m < trellis_fp32_padded_width(slots)) row[m] = m < slots ? x.at[0][i] : 0.f;
    });
  }
  // Sum of term(y, a) over the slots. Callers without targets pass z as a.
  template <class Map, class Term>
  __device__ float sum(const Map& map, const float* z, const float* a, const Term& term) const {
    float sum = 0.f;
    each([&](int first) {
      const SlotPair y = activated(map, z, first).y, target = load(a, first);
      for_pair(first, [&](int m, int i) { sum += m < slots ? term(y.at[0][i], target.at[0][i]) : 0.f; });
    });
    return sum_over_warp(sum);
  }

  template <class Map>
  __device__ Activated activated(const Map& map, const float* z, int first) const {
    Activated x{load(z, first), {}, {}};
    activate<float>(map, x.y, x.slope, &x.curvature);
    return x;
  }

  // Statistics of y and a; z [M] and a [M] are rows.
  template <class Map>
  __device__ CenteredStats compute_row_stats(const Map& map, const float* z, const float* a) const {
    if constexpr (Map::softmax) {
      float max_y = -INFINITY;
      each([&](int first) {
        for_pair(first, [&](int m, int) { max_y = m < slots ? fmaxf(max_y, z[m]) : max_y; });
      });
#pragma unroll
      for (int other = 1; other < 32; other *= 2) max_y = fmaxf(max_y, __shfl_xor_sync(~0u, max_y, other));
      const float inverse = 1.f / sum(map, z, a, [&](float y, float) { return expf(y - max_y); });
      const float ee = sum(map, z, a, [&](float y, float) {
        const float e = expf(y - max_y);
        return e * e;
      });
      const float ae = sum(map, z, a, [&](float y, float target) { return target * expf(y - max_y); });
      return {{max_y, inverse, ee * inverse * inverse, ae * inverse}, 0.f};
    } else {
      const float mean = map.mean_factor * sum(map, z, a, [](float y, float) { return y; });
      const float square = sum(map, z, a, [&](float y, float) { return (y - mean) * (y - mean); });
      const float mean_a = map.mean_factor * sum(map, z, a, [](float, float target) { return target; });
      const float sum_ay =
          sum(map, z, a, [&](float y, float target) { return (target - mean_a) * (y - mean); });
      return {stats_about_mean(map, mean, square, sum_ay, 0.f), mean_a};
    }
  }
  // The targets of a pair, centered.
  __device__ SlotPair load_targets(const float* a, int first, const CenteredStats& stats) const {
    SlotPair x = load(a, first);
    for_pair(first, [&](int m, int i) { x.at[0][i] -= m < slots ? stats.mean_a : 0.f; });
    return x;
  }
  // Makes e^{y - max} finite for padding slots.
  template <class Map>
  __device__ void fill_padding(const Map&, SlotPair& y, int first, const MapStats& stats) const {
    if constexpr (Map::softmax) {
      for_pair(first, [&](int m, int i) { y.at[0][i] = m < slots ? y.at[0][i] : stats.mean; });
    }
  }

  // u = J^T (phi(z) - a). Calls f(first slot, z, u) for each pair.
  template <class Map, class F>
  __device__ void residual(const Map& map, const float* z, const float* a, const F& f) const {
    const CenteredStats stats = compute_row_stats(map, z, a);
    each([&](int first) {
      Activated x = activated(map, z, first);
      compute_residual(map, x.y, x.slope, load_targets(a, first, stats), stats.map, 0);
      f(first, load(z, first), x.y);
    });
  }

  // With du = scale * x: calls f(first slot, u, dz = H du, J du) for each pair.
  template <class Map, class F>
  __device__ void gradients(const Map& map, const float* z, const float* a, const float* x, float scale,
                            const F& f) const {
    const CenteredStats stats = compute_row_stats(map, z, a);
    const auto du = [&](int first) {
      SlotPair du_pair = load(x, first);
      du_pair.at[0][0] *= scale, du_pair.at[0][1] *= scale;
      return du_pair;
    };
    float3 sums{0.f, 0.f, 0.f};
    each([&](int first) {
      Activated at = activated(map, z, first);
      fill_padding(map, at.y, first, stats.map);
      const float3 own =
          compute_jacobian_sums(map, du(first), at.y, at.slope, load_targets(a, first, stats), stats.map, 0);
      sums = {sums.x + own.x, sums.y + own.y, sums.z + own.z};
    });
    sums = {sum_over_warp(sums.x), sum_over_warp(sums.y), sum_over_warp(sums.z)};
    each([&](int first) {
      Activated at = activated(map, z, first);
      fill_padding(map, at.y, first, stats.map);
      const SlotPair of = load_targets(a, first, stats);
      SlotPair u = at.y, dz = du(first), dot = dz;
      compute_residual(map, u, at.slope, of, stats.map, 0);
      if constexpr (!Map::softmax) compute_curvature_term(at.curvature, at.y, of, stats.map, 0);
      apply_hessian(map, dz, at.y, at.slope, at.curvature, of, stats.map, sums, 0);
      apply_jacobian(map, dot, at.y, at.slope, stats.map, sums, 0);
      f(first, u, dz, dot);
    });
  }

  // The same with a weight w of phi (fp32_kernels.h). e = w (w n - a), n = phi(z):
  //
  //     u = J^T e       da = -w J du       dw = (2 w n - a) J du       dz = slope dg + slope' g du
  //
  // For all maps but softmax, by y, with x' = slope du, r the root of n's norm and P x = x - mean(x):
  //
  //     g = (P e - n s) / r                    s = n.e / N
  //     j = (P x' - n alpha) / r               alpha = n.x' / N         (J du)
  //     dg = (P (w^2 j) - s j - n ds - alpha g) / r                    ds = (j.e + n.w^2 j) / N
  struct WeightedStats {
    float mean, inverse, s, mean_e;  // softmax: the largest y, 1 / sum of e^{y - max}, n.e, 0
  };
  template <class Map>
  __device__ static float normalized(const Map& map, const WeightedStats& stats, float y) {
    if constexpr (Map::softmax) return softmax_of(map, MapStats{stats.mean, stats.inverse, 0.f, 0.f}, y);
    return (y - stats.mean) * stats.inverse;
  }
  __device__ static float weighted_error(float n, float a, float w) { return w * (w * n - a); }
  template <class Map>
  __device__ WeightedStats compute_row_stats(const Map& map, const float* z, const float* a,
                                             const float* w) const {
    WeightedStats stats{0.f, 1.f, 0.f, 0.f};
    if constexpr (Map::softmax) {
      const MapStats whole = compute_row_stats(map, z, a).map;
      stats.mean = whole.mean, stats.inverse = whole.inverse;
    } else {
      stats.mean = map.mean_factor * sum(map, z, a, [](float y, float) { return y; });
      const float square =
          sum(map, z, a, [&](float y, float) { return (y - stats.mean) * (y - stats.mean); });
      stats.inverse = stats_about_mean(map, stats.mean, square, 0.f, 0.f).inverse;
    }
    float dot = 0.f, sum_e = 0.f;
    each([&](int first) {
      const SlotPair y = activated(map, z, first).y, target = load(a, first), weight = load(w, first);
      for_pair(first, [&](int m, int i) {
        const float n = normalized(map, stats, y.at[0][i]),
                    e = weighted_error(n, target.at[0][i], weight.at[0][i]);
        dot += m < slots ? n * e : 0.f, sum_e += m < slots ? e : 0.f;
      });
    });
    stats.s = sum_over_warp(dot) * (Map::softmax ? 1.f : map.norm_factor);
    stats.mean_e = Map::softmax ? 0.f : sum_over_warp(sum_e) * map.mean_factor;
    return stats;
  }
  // g; softmax: u
  template <class Map>
  __device__ static float gradient_of(const Map&, const WeightedStats& stats, float n, float e) {
    if constexpr (Map::softmax) return n * (e - stats.s);
    return (e - stats.mean_e - n * stats.s) * stats.inverse;
  }

  template <class Map, class F>
  __device__ void residual(const Map& map, const float* z, const float* a, const float* w, const F& f) const {
    const WeightedStats stats = compute_row_stats(map, z, a, w);
    each([&](int first) {
      const Activated x = activated(map, z, first);
      const SlotPair target = load(a, first), weight = load(w, first);
      SlotPair u = x.y;
      for_pair(first, [&](int, int i) {
        const float n = normalized(map, stats, x.y.at[0][i]),
                    e = weighted_error(n, target.at[0][i], weight.at[0][i]);
        u.at[0][i] = x.slope.at[0][i] * gradient_of(map, stats, n, e);
      });
      f(first, load(z, first), u);
    });
  }

  // With du = scale * x: calls f(first slot, u, dz, w J du, dw) for each pair.
  template <class Map, class F>
  __device__ void gradients(const Map& map, const float* z, const float* a, const float* w, const float* x,
                            float scale, const F& f) const {
    const WeightedStats stats = compute_row_stats(map, z, a, w);
    // Calls term(index in the pair, n, e, x', w) for slots that exist.
    const auto for_slots = [&](int first, const auto& term) {
      const Activated at = activated(map, z, first);
      const SlotPair target = load(a, first), weight = load(w, first), given = load(x, first);
      for_pair(first, [&](int m, int i) {
        if (m >= slots) return;
        const float n = normalized(map, stats, at.y.at[0][i]),
                    e = weighted_error(n, target.at[0][i], weight.at[0][i]);
        term(i, n, e, at.slope.at[0][i] * (scale * given.at[0][i]), weight.at[0][i]);
      });
    };
    float all = 0.f, dot = 0.f;
    each([&](int first) {
      for_slots(first, [&](int, float n, float, float x, float) { all += x, dot = fmaf(n, x, dot); });
    });
    const float mean_x = Map::softmax ? 0.f : sum_over_warp(all) * map.mean_factor;
    const float alpha = sum_over_warp(dot) * (Map::softmax ? 1.f : map.norm_factor);
    const auto tangent = [&](float n, float x) {
      return Map::softmax ? n * (x - alpha) : (x - mean_x - n * alpha) * stats.inverse;
    };
    all = dot = 0.f;
    each([&](int first) {
      for_slots(first, [&](int, float n, float e, float x, float w) {
        const float j = tangent(n, x), de = w * w * j;
        all += de, dot = fmaf(j, e, fmaf(n, de, dot));
      });
    });
    const float mean_de = Map::softmax ? 0.f : sum_over_warp(all) * map.mean_factor;
    const float ds = sum_over_warp(dot) * (Map::softmax ? 1.f : map.norm_factor);
    each([&](int first) {
      const Activated at = activated(map, z, first);
      const SlotPair target = load(a, first), given = load(x, first);
      SlotPair u, dz, da, dw;
      fill(u, 0.f), fill(dz, 0.f), fill(da, 0.f), fill(dw, 0.f);
      for_slots(first, [&](int i, float n, float e, float x, float w) {
        const float j = tangent(n, x), de = w * w * j, g = gradient_of(map, stats, n, e);
        const float slope = at.slope.at[0][i];
        u.at[0][i] = slope * g;
        if constexpr (Map::softmax) {
          dz.at[0][i] = j * (e - stats.s) + n * (de - ds);
        } else {
          const float dg = (de - mean_de - stats.s * j - n * ds - alpha * g) * stats.inverse;
          dz.at[0][i] = slope * dg + at.curvature.at[0][i] * g * (scale * given.at[0][i]);
        }
        da.at[0][i] = w * j, dw.at[0][i] = j * (2.f * w * n - target.at[0][i]);
      });
      f(first, u, dz, da, dw);
    });
  }

  // r = f(y) and, if dr is present, J^T dr. Calls to(first slot, r, J^T dr) for each pair. z is y before the
  // map.
  template <class Map, class F>
  __device__ void map_with_gradient(const Map& map, const float* z, const float* dr, const F& to) const {
    const MapStats stats = compute_row_stats(map, z, z).map;
    const auto normalized = [&](const Activated& x) {
      SlotPair r = x.y;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& own = r.at[0][i];
        own = Map::softmax ? softmax_of(map, stats, own) : (own - stats.mean) * stats.inverse;
      }
      return r;
    };
    float dot = 0.f, mean = 0.f;
    if (dr != nullptr) {
      dot = sum(map, z, dr, [&](float y, float own) {
        return own * (Map::softmax ? softmax_of(map, stats, y) : (y - stats.mean) * stats.inverse);
      });
      mean = map.mean_factor * sum(map, z, dr, [](float, float own) { return own; });
    }
    // slope * (P dr - r (r.dr) / N) / root; softmax: r * (dr - r.dr)
    each([&](int first) {
      const Activated x = activated(map, z, first);
      const SlotPair r = normalized(x);
      SlotPair dy = r;
      if (dr != nullptr) dy = load(dr, first);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& own = dy.at[0][i];
        const float image = r.at[0][i];
        own = Map::softmax ? image * (own - dot)
                           : x.slope.at[0][i] * (own - mean - image * dot * map.norm_factor) * stats.inverse;
      }
      to(first, r, dy);
    });
  }
};

}  // namespace girih::kernels::trellis

// The maps of a row of slots in fp32, by one warp (maps.cuh, map_gradients.cuh). A lane has every 32nd slot,
// in pairs: half of the four elements of Sums<1>. It reloads the slots for every sum, because the matrix of
// the block leaves few registers.
#pragma once

#include "trellis/exact_memory.cuh"
#include "trellis/map_gradients.cuh"

namespace girih::kernels::trellis {

using Two = Sums<1>;

// z before the norm of a map: y, its slope and its second derivative.
struct Activated {
  Two y, slope, curve;
};

// A Fit to targets whose mean was subtracted before; `fit` has no mean of a. For a row of one slot the result
// is exactly 0, not a rounding error times 1 / r.
struct CentredFit {
  Fit fit;
  float mean;
};

template <class Sizes>
struct ExactRow {
  static constexpr int kPairs = Sizes::Tile / 64, kUnroll = Sizes::Tile == 256 ? 1 : kPairs;
  const int slots;

  // Calls f(slot, index in the pair).
  template <class F>
  __device__ static void two(int first, const F& f) {
    f(first, 0), f(first + 32, 1);
  }
  // Calls f(first slot of a pair) for all pairs of the lane.
  template <class F>
  __device__ static void each(const F& f) {
#pragma unroll kUnroll
    for (int n = 0; n < kPairs; ++n) f(64 * n + lane());
  }
  // Loads a pair; 0 for padding slots.
  __device__ Two load(const float* row, int first) const {
    Two x;
    fill(x, 0.f);
    two(first, [&](int m, int i) { x.at[0][i] = m < slots ? row[m] : 0.f; });
    return x;
  }
  // Stores a pair; padding slots of a row get 0.
  __device__ void store(float* row, int first, const Two& x) const {
    two(first, [&](int m, int i) {
      if (m < trellis_exact_packed(slots)) row[m] = m < slots ? x.at[0][i] : 0.f;
    });
  }
  // Sum of term(y, a) over the slots. Callers without targets pass z as a.
  template <class Map, class Term>
  __device__ float sum(const Map& map, const float* z, const float* a, const Term& term) const {
    float sum = 0.f;
    each([&](int first) {
      const Two y = activated(map, z, first).y, target = load(a, first);
      two(first, [&](int m, int i) { sum += m < slots ? term(y.at[0][i], target.at[0][i]) : 0.f; });
    });
    return over_warp(sum);
  }

  template <class Map>
  __device__ Activated activated(const Map& map, const float* z, int first) const {
    Activated x{load(z, first), {}, {}};
    activate<float>(map, x.y, x.slope, &x.curve);
    return x;
  }

  // Statistics of y and a.
  template <class Map>
  __device__ CentredFit fit(const Map& map, const float* z, const float* a) const {
    if constexpr (Map::softmax) {
      float most = -INFINITY;
      each([&](int first) { two(first, [&](int m, int) { most = m < slots ? fmaxf(most, z[m]) : most; }); });
#pragma unroll
      for (int other = 1; other < 32; other *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
      const float inverse = 1.f / sum(map, z, a, [&](float y, float) { return expf(y - most); });
      const float ee = sum(map, z, a, [&](float y, float) {
        const float e = expf(y - most);
        return e * e;
      });
      const float ae = sum(map, z, a, [&](float y, float target) { return target * expf(y - most); });
      return {{most, inverse, ee * inverse * inverse, ae * inverse}, 0.f};
    } else {
      const float mean = map.centre * sum(map, z, a, [](float y, float) { return y; });
      const float square = sum(map, z, a, [&](float y, float) { return (y - mean) * (y - mean); });
      const float mean_a = map.centre * sum(map, z, a, [](float, float target) { return target; });
      const float with_a =
          sum(map, z, a, [&](float y, float target) { return (target - mean_a) * (y - mean); });
      return {fit_about(map, mean, square, with_a, 0.f), mean_a};
    }
  }
  __device__ Two target(const float* a, int first, const CentredFit& found) const {
    Two x = load(a, first);
    two(first, [&](int m, int i) { x.at[0][i] -= m < slots ? found.mean : 0.f; });
    return x;
  }
  // Makes e^{y - max} finite for padding slots.
  template <class Map>
  __device__ void settle(const Map&, Two& y, int first, const Fit& found) const {
    if constexpr (Map::softmax) {
      two(first, [&](int m, int i) { y.at[0][i] = m < slots ? y.at[0][i] : found.mean; });
    }
  }

  // u = J^T (phi(z) - a). Calls f(first slot, z, u) for each pair.
  template <class Map, class F>
  __device__ void residual(const Map& map, const float* z, const float* a, const F& f) const {
    const CentredFit found = fit(map, z, a);
    each([&](int first) {
      Activated x = activated(map, z, first);
      to_residual(map, x.y, x.slope, target(a, first, found), found.fit, 0);
      f(first, load(z, first), x.y);
    });
  }

  // With du = by * x: calls f(first slot, u, dz = H du, J du) for each pair.
  template <class Map, class F>
  __device__ void gradients(const Map& map, const float* z, const float* a, const float* x, float by,
                            const F& f) const {
    const CentredFit found = fit(map, z, a);
    const auto du = [&](int first) {
      Two two = load(x, first);
      two.at[0][0] *= by, two.at[0][1] *= by;
      return two;
    };
    float3 sums{0.f, 0.f, 0.f};
    each([&](int first) {
      Activated at = activated(map, z, first);
      settle(map, at.y, first, found.fit);
      const float3 own = products_of(map, du(first), at.y, at.slope, target(a, first, found), found.fit, 0);
      sums = {sums.x + own.x, sums.y + own.y, sums.z + own.z};
    });
    sums = {over_warp(sums.x), over_warp(sums.y), over_warp(sums.z)};
    each([&](int first) {
      Activated at = activated(map, z, first);
      settle(map, at.y, first, found.fit);
      const Two of = target(a, first, found);
      Two u = at.y, dz = du(first), along = dz;
      to_residual(map, u, at.slope, of, found.fit, 0);
      if constexpr (!Map::softmax) to_bend(at.curve, at.y, of, found.fit, 0);
      to_hessian_product(map, dz, at.y, at.slope, at.curve, of, found.fit, sums, 0);
      to_jacobian_product(map, along, at.y, at.slope, found.fit, sums, 0);
      f(first, u, dz, along);
    });
  }

  // The same with a weight w of phi (exact.h). e = w (w n - a), n = phi(z):
  //
  //     u = J^T e       da = -w J du       dw = (2 w n - a) J du       dz = slope dg + slope' g du
  //
  // For all maps but softmax, by y, with x' = slope du, r the root of n's norm and P x = x - mean(x):
  //
  //     g = (P e - n s) / r                    s = n.e / N
  //     j = (P x' - n alpha) / r               alpha = n.x' / N         (J du)
  //     dg = (P (w^2 j) - s j - n ds - alpha g) / r                    ds = (j.e + n.w^2 j) / N
  struct WeightedFit {
    float mean, inverse, s, mean_e;  // softmax: the largest y, 1 / sum of e^{y - max}, n.e, 0
  };
  template <class Map>
  __device__ static float image_of(const Map& map, const WeightedFit& found, float y) {
    if constexpr (Map::softmax) return softmax_of(map, Fit{found.mean, found.inverse, 0.f, 0.f}, y);
    return (y - found.mean) * found.inverse;
  }
  __device__ static float error_of(float n, float a, float w) { return w * (w * n - a); }
  template <class Map>
  __device__ WeightedFit fit(const Map& map, const float* z, const float* a, const float* w) const {
    WeightedFit found{0.f, 1.f, 0.f, 0.f};
    if constexpr (Map::softmax) {
      const Fit whole = fit(map, z, a).fit;
      found.mean = whole.mean, found.inverse = whole.inverse;
    } else {
      found.mean = map.centre * sum(map, z, a, [](float y, float) { return y; });
      const float square =
          sum(map, z, a, [&](float y, float) { return (y - found.mean) * (y - found.mean); });
      found.inverse = fit_about(map, found.mean, square, 0.f, 0.f).inverse;
    }
    float along = 0.f, all = 0.f;
    each([&](int first) {
      const Two y = activated(map, z, first).y, target = load(a, first), weight = load(w, first);
      two(first, [&](int m, int i) {
        const float n = image_of(map, found, y.at[0][i]), e = error_of(n, target.at[0][i], weight.at[0][i]);
        along += m < slots ? n * e : 0.f, all += m < slots ? e : 0.f;
      });
    });
    found.s = over_warp(along) * (Map::softmax ? 1.f : map.unit);
    found.mean_e = Map::softmax ? 0.f : over_warp(all) * map.centre;
    return found;
  }
  // g; softmax: u
  template <class Map>
  __device__ static float gradient_of(const Map&, const WeightedFit& found, float n, float e) {
    if constexpr (Map::softmax) return n * (e - found.s);
    return (e - found.mean_e - n * found.s) * found.inverse;
  }

  template <class Map, class F>
  __device__ void residual(const Map& map, const float* z, const float* a, const float* w, const F& f) const {
    const WeightedFit found = fit(map, z, a, w);
    each([&](int first) {
      const Activated x = activated(map, z, first);
      const Two target = load(a, first), weight = load(w, first);
      Two u = x.y;
      two(first, [&](int, int i) {
        const float n = image_of(map, found, x.y.at[0][i]), e = error_of(n, target.at[0][i], weight.at[0][i]);
        u.at[0][i] = x.slope.at[0][i] * gradient_of(map, found, n, e);
      });
      f(first, load(z, first), u);
    });
  }

  // With du = by * x: calls f(first slot, u, dz, w J du, dw) for each pair.
  template <class Map, class F>
  __device__ void gradients(const Map& map, const float* z, const float* a, const float* w, const float* x,
                            float by, const F& f) const {
    const WeightedFit found = fit(map, z, a, w);
    // Calls term(index in the pair, n, e, x', w) for slots that exist.
    const auto of_slots = [&](int first, const auto& term) {
      const Activated at = activated(map, z, first);
      const Two target = load(a, first), weight = load(w, first), given = load(x, first);
      two(first, [&](int m, int i) {
        if (m >= slots) return;
        const float n = image_of(map, found, at.y.at[0][i]),
                    e = error_of(n, target.at[0][i], weight.at[0][i]);
        term(i, n, e, at.slope.at[0][i] * (by * given.at[0][i]), weight.at[0][i]);
      });
    };
    float all = 0.f, along = 0.f;
    each([&](int first) {
      of_slots(first, [&](int, float n, float, float x, float) { all += x, along = fmaf(n, x, along); });
    });
    const float mean_x = Map::softmax ? 0.f : over_warp(all) * map.centre;
    const float alpha = over_warp(along) * (Map::softmax ? 1.f : map.unit);
    const auto tangent = [&](float n, float x) {
      return Map::softmax ? n * (x - alpha) : (x - mean_x - n * alpha) * found.inverse;
    };
    all = along = 0.f;
    each([&](int first) {
      of_slots(first, [&](int, float n, float e, float x, float w) {
        const float j = tangent(n, x), de = w * w * j;
        all += de, along = fmaf(j, e, fmaf(n, de, along));
      });
    });
    const float mean_de = Map::softmax ? 0.f : over_warp(all) * map.centre;
    const float ds = over_warp(along) * (Map::softmax ? 1.f : map.unit);
    each([&](int first) {
      const Activated at = activated(map, z, first);
      const Two target = load(a, first), given = load(x, first);
      Two u, dz, da, dw;
      fill(u, 0.f), fill(dz, 0.f), fill(da, 0.f), fill(dw, 0.f);
      of_slots(first, [&](int i, float n, float e, float x, float w) {
        const float j = tangent(n, x), de = w * w * j, g = gradient_of(map, found, n, e);
        const float slope = at.slope.at[0][i];
        u.at[0][i] = slope * g;
        if constexpr (Map::softmax) {
          dz.at[0][i] = j * (e - found.s) + n * (de - ds);
        } else {
          const float dg = (de - mean_de - found.s * j - n * ds - alpha * g) * found.inverse;
          dz.at[0][i] = slope * dg + at.curve.at[0][i] * g * (by * given.at[0][i]);
        }
        da.at[0][i] = w * j, dw.at[0][i] = j * (2.f * w * n - target.at[0][i]);
      });
      f(first, u, dz, da, dw);
    });
  }

  // r = f(y) and, if dr is present, J^T dr. Calls to(first slot, r, J^T dr) for each pair.
  template <class Map, class F>
  __device__ void image(const Map& map, const float* z, const float* dr, const F& to) const {
    const Fit found = fit(map, z, z).fit;
    const auto image_of = [&](const Activated& x) {
      Two r = x.y;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& own = r.at[0][i];
        own = Map::softmax ? softmax_of(map, found, own) : (own - found.mean) * found.inverse;
      }
      return r;
    };
    float along = 0.f, mean = 0.f;
    if (dr != nullptr) {
      along = sum(map, z, dr, [&](float y, float own) {
        return own * (Map::softmax ? softmax_of(map, found, y) : (y - found.mean) * found.inverse);
      });
      mean = map.centre * sum(map, z, dr, [](float, float own) { return own; });
    }
    // slope * (P dr - r (r.dr) / N) / root; softmax: r * (dr - r.dr)
    each([&](int first) {
      const Activated x = activated(map, z, first);
      const Two r = image_of(x);
      Two dy = r;
      if (dr != nullptr) dy = load(dr, first);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& own = dy.at[0][i];
        const float image = r.at[0][i];
        own = Map::softmax ? image * (own - along)
                           : x.slope.at[0][i] * (own - mean - image * along * map.unit) * found.inverse;
      }
      to(first, r, dy);
    });
  }
};

}  // namespace girih::kernels::trellis

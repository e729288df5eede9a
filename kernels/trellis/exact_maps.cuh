// The maps of a row of slots by one warp, in fp32 throughout (maps.cuh, map_gradients.cuh). A lane has every
// 32nd slot, two at a time: of the Sums of those files two of the first four. It reads them anew for every
// sum: beside a matrix there are few registers.
#pragma once

#include "trellis/exact_memory.cuh"
#include "trellis/map_gradients.cuh"

namespace girih::kernels::trellis {

using Two = Sums<1>;

// z as it is before a map's norm.
struct Activated {
  Two y, slope, curve;
};

// A Fit to targets of which the mean is taken off first, where the map sees no mean: of a row of one slot
// nothing is left then, and not a rounding times 1 / r.
struct CentredFit {
  Fit fit;
  float mean;
};

template <class Sizes>
struct ExactRow {
  static constexpr int kPairs = Sizes::Tile / 64, kUnroll = Sizes::Tile == 256 ? 1 : kPairs;
  const int slots;

  // f(slot, the place of it among two)
  template <class F>
  __device__ static void two(int first, const F& f) {
    f(first, 0), f(first + 32, 1);
  }
  // f(first of two slots): of all.
  template <class F>
  __device__ static void each(const F& f) {
#pragma unroll kUnroll
    for (int n = 0; n < kPairs; ++n) f(64 * n + lane());
  }
  // Of slots that exist; else 0.
  __device__ Two load(const float* row, int first) const {
    Two x;
    fill(x, 0.f);
    two(first, [&](int m, int i) { x.at[0][i] = m < slots ? row[m] : 0.f; });
    return x;
  }
  // In packs: with zeros behind the slots.
  __device__ void store(float* row, int first, const Two& x) const {
    two(first, [&](int m, int i) {
      if (m < trellis_exact_packed(slots)) row[m] = m < slots ? x.at[0][i] : 0.f;
    });
  }
  // The sum of term(y, a) over the slots; of no a: of y twice.
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

  // What the sums of y, silu(z) or z, with a come to.
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
  // e^{y - it} is to be finite behind the slots, too.
  template <class Map>
  __device__ void settle(const Map&, Two& y, int first, const Fit& found) const {
    if constexpr (Map::softmax) {
      two(first, [&](int m, int i) { y.at[0][i] = m < slots ? y.at[0][i] : found.mean; });
    }
  }

  // u = J^T (phi(z) - a), of every two slots: f(the first of them, z, u).
  template <class Map, class F>
  __device__ void residual(const Map& map, const float* z, const float* a, const F& f) const {
    const CentredFit found = fit(map, z, a);
    each([&](int first) {
      Activated x = activated(map, z, first);
      to_residual(map, x.y, x.slope, target(a, first, found), found.fit, 0);
      f(first, load(z, first), x.y);
    });
  }

  // Of du = by * x: f(the first of two slots, u, dz = H du, J du).
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

  // r = f(y), and J^T dr if it is asked for: to(the first of two slots, r, J^T dr).
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
    // slope * (P dr - r (r.dr) / N) / root, or r * (dr - r.dr)
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

// State warps of the reverse scan. G is the gradient of A at the end of a chunk, and (l, w) are the reads of
// A:
//
//     dU_i = direct_i - gamma_i e^{L_C - L_i} G x_i        dZ_i = (Hessian of E at z_i) dU_i
//     G   <- e^{L_C} G + sum over t of e^{L_t} l_t w_t^T + dZ^T X
#pragma once

#include "trellis/map_gradients.cuh"
#include "trellis/reverse_space.cuh"
#include "trellis/reverse_state.cuh"

namespace girih::kernels {

// state += y^T x in global memory, for an A' that is not an A of this call.
template <typename T, int K, class Token, int S>
__device__ inline void add_apart(const Out<4>& state, const Slice<S>& y, const Token& x,
                                 const TrellisPart& part, const TrellisShape& shape, int slot) {
#pragma unroll 1
  for (int k = 0; k < K; ++k) {
    Sums<S> sums;
    fill(sums, 0.f);
    add_columns<T>(sums, x, 16 * k, y);
    each_element<true, S>(state, part, shape, 16 * k, slot, [&](int n, int i, int64_t at) {
      static_cast<float*>(state.data)[at] += sums.at[n][i];
    });
  }
}

// Inputs of a tile that do not depend on G, for the warp's slots.
template <int S>
struct ReverseTile {
  Sums<S> y, slope, bend;
  Slice<S> a, direct;  // packed, to save registers
  Fit fits[2];
  float2 step;

  template <typename T, class Map, class Space, class Weights>
  __device__ void load(const Map& phi, const Space& space, int s, int slot, const Weights& weights) {
    const auto& numbers = space.numbers(s);
    Slice<S> z;
    Sums<S> target;
    load_slice(z, space.token(s, Space::kZ), slot);
    load_slice(a, space.token(s, Space::kA), slot);
    load_slice(direct, space.token(s, Space::kDirect), slot);
    unpack<T>(y, z);
    unpack<T>(target, a);
    step = {numbers.step[lane_row()], numbers.step[lane_row() + 8]};
    fits[0] = numbers.fits[lane_row()], fits[1] = numbers.fits[lane_row() + 8];
    activate<T>(phi, y, slope, &bend);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Map::weighted) {
        if (half == 0) weigh(target, weights);
        to_weighted_bend(bend, y, target, weights, fits[half], half);
      } else {
        to_bend(bend, y, target, fits[half], half);
      }
    }
  }
};

// Loads G of the end of the sequence. If the chunk in which the sequence starts began earlier, also
// initialises its dA', which is not a term of dA.
template <int K, int S>
__device__ inline void begin_reverse(Held<K, S>& G, const TrellisReverse& p, const TrellisPart& part,
                                     bool within, int slot) {
  const TrellisShape& shape = p.shape;
  const int memory = part.memory;
  const bool positions = p.dfirst[memory].data != nullptr;
  clear(G);
  add_state(G, p.dlast[memory], part, shape, slot);
  // A' of the final state is A if the last chunk is complete, and the caller's A' if there are no tokens.
  const int64_t chunks = part.of.chunks;
  if (chunks > 0 ? !within : !positions) add_state(G, p.dlast_first[memory], part, shape, slot);
  if (!positions) return;
  Held<K, S> apart;
  clear(apart);
  if (chunks == 0 || (chunks == 1 && within)) add_state(apart, p.dlast_first[memory], part, shape, slot);
  store_state(p.dfirst[memory], apart, part, shape, slot);
}

// Short: a chunk has at most one tile. Its output warp waits for `written`, which also covers G.
template <typename T, int Tile, class Map, bool Short>
__device__ inline void run_reverse(const TrellisReverse& p, const TrellisPart& part,
                                   const TrellisReverseSpace<T, Tile>& space, int warp) {
  using Space = TrellisReverseSpace<T, Tile>;
  constexpr int K = Tile / 16, kWarps = Space::kChain, S = Tile / kWarps / 8;
  constexpr bool kAhead = Space::kAhead;
  const TrellisShape& shape = p.shape;
  const int memory = part.memory, slot = 8 * S * warp, own_row = lane_row() + 8 * (lane() & 1);
  const Map phi(shape.phi, shape.slots);
  const Columns columns{slot, shape.slots};
  uint32_t bits[S];
#pragma unroll
  for (int n = 0; n < S; ++n) bits[n] = columns.bits(n);
  // The gradient of phi's weight is summed over the tokens.
  const std::conditional_t<Map::weighted, Weights<S>, NoWeights> weights(p.weight + part.head * shape.M,
                                                                         columns);
  float dw[S][2] = {};
  const int64_t last = part.of.chunks - 1;
  const bool within = last >= 0 && !chunk_of(shape.grid, part.of, last).complete;
  Held<K, S> G;
  begin_reverse(G, p, part, within, slot);

  // With kAhead the next tile is loaded while this tile waits for the sums.
  Right<K, S> after;  // G at the end of the chunk, rounded
  Turn turn, place;
  ReverseTile<S> ready;
  const auto make_ready = [&](const Turn& at) {
    wait(space.full() + at.place, at.parity);
    ready.template load<T>(phi, space, at.place, slot, weights);
  };
  if (kAhead && last >= 0) make_ready(turn);
  bool more = last >= 0;  // whether there are tiles
  bool open = within;     // until the incomplete last chunk is done
#pragma unroll 1
  for (unsigned tiles = 0; more; ++tiles) {
    const int s = turn.place;
    if (!kAhead) make_ready(turn);
    const int marks = space.numbers(s).marks;
    more = !(marks & Space::kEnds);
    turn.next(Space::kStages);
    const bool enters = marks & Space::kEnters;
    if (enters) round_to<T>(after, G);

    // dU
    Sums<S> du, a, direct;
    product_with<T>(du, space.token(s, Space::kX), after);
    if (enters) {
      // Overlaps with the product.
      wait(space.taken() + place.place, place.parity ^ 1);
      store_right(space.gradient(place.place), slot, after);
      if (!Short) arrive_once(space.left() + place.place);
      place.next(Space::kPlaces);
      const float decay = space.numbers(s).decay;
      if (decay != 1.f) scale(G, decay);
    }
    const ReverseTile<S> tile = ready;
    unpack<T>(a, tile.a);
    unpack<T>(direct, tile.direct);
#pragma unroll
    for (int n = 0; n < S; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        du.at[n][e] = fmaf(e < 2 ? tile.step.x : tile.step.y, du.at[n][e], direct.at[n][e]);
      }
    }
    // Sums of both rows over the quad: each lane gets the sums of one row.
    float4* table = space.table(tiles);
    float4 of_weight[2];
    if constexpr (Map::weighted) {
      weigh(a, weights);
      float4 sums[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        of_weight[half] = space.weight_fits(s)[lane_row() + 8 * half];
        sums[half] = weighted_products_of(du, tile.y, tile.slope, a, weights, tile.fits[half], half);
      }
      const float4 own = sum_of_rows(sums);
      if ((lane() & 2) == 0) table[warp * kTile + own_row] = own;
    } else {
      const float3 sums[2] = {products_of(phi, du, tile.y, tile.slope, a, tile.fits[0], 0),
                              products_of(phi, du, tile.y, tile.slope, a, tile.fits[1], 1)};
      const float3 own = sum_of_rows(sums);
      if ((lane() & 2) == 0) table[warp * kTile + own_row] = {own.x, own.y, own.z, 0.f};
    }

    // G += sum over t of e^{L_t} l_t w_t^T, and the loads of the next tile, overlap with the wait for the
    // other warps
    Slice<S> weighed;
    load_right_slice(weighed, space.token(s, Space::kWeighed), slot);
    add_step<T>(G, space.token(s, Space::kW), weighed);
    if (kAhead && more) make_ready(turn);

    // dZ, and -J dU
    Sums<S> targets = du;
    barrier_wait(1, 32 * kWarps);
    std::conditional_t<Map::weighted, float4, float3> all{}, of_rows[2];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 of_warp = table[w * kTile + own_row];
      all.x += of_warp.x, all.y += of_warp.y, all.z += of_warp.z;
      if constexpr (Map::weighted) all.w += of_warp.w;
    }
    unpack<T>(a, tile.a);
    both_rows(of_rows, all);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Map::weighted) {
        to_weighted_products(phi, du, targets, dw, tile.y, tile.slope, tile.bend, a, weights, tile.fits[half],
                             of_weight[half], of_rows[half], half);
      } else {
        to_jacobian_product(phi, targets, tile.y, tile.slope, tile.fits[half], of_rows[half], half);
        to_hessian_product(phi, du, tile.y, tile.slope, tile.bend, a, tile.fits[half], of_rows[half], half);
      }
    }
    // G += dZ^T X
    Slice<S> dz, da;
    round_to<T>(dz, du);
    clear_missing(dz, bits);
    const Slice<S> step = right_factor(dz);
    if (marks & Space::kResumed) {
      add_apart<T, K>(p.dfirst[memory], step, space.token(s, Space::kX), part, shape, slot);
    } else {
      add_step<T>(G, space.token(s, Space::kX), step);
    }
    // The warp has loaded its slots of z and a, and overwrites these.
    store_slice(space.token(s, Space::kZ), slot, dz);
    round_to<T>(da, targets);
#pragma unroll
    for (int i = 0; i < 2 * S; ++i) da.at[i] ^= 0x80008000u;  // -J dU
    store_slice(space.token(s, Space::kA), slot, da);
    arrive_once(space.written() + s);
    if (open && marks & Space::kLeaves) {
      if (!(marks & Space::kResumed)) add_state(G, p.dlast_first[memory], part, shape, slot);
      open = false;
    }
  }
  store_state(p.dinitial[memory], G, part, shape, slot);
  if constexpr (Map::weighted) {
    float* const to = p.dweight + (part.sequence * shape.heads + part.head) * shape.M + slot;
#pragma unroll
    for (int n = 0; n < S; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_over_col(dw[n][i]);
        if (lane_row() == 0 && columns.has(n, i)) to[8 * n + lane_col() + i] = sum;
      }
    }
  }
}

}  // namespace girih::kernels

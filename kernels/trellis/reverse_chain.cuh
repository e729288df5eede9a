// The reverse pass's chain: the gradients of both memories from chunk to chunk, from the end. With G that of
// A after a chunk and (l, w) its reads,
//     dU_i = direct_i - gamma_i e^{L_C - L_i} G x_i        dZ_i = Hessian of E at z_i times dU_i
//     G   <- e^{L_C} G + sum over t of e^{L_t} l_t w_t^T + dZ^T X
// Warps have G as those of the scan have A.
#pragma once

#include "trellis/map_gradients.cuh"
#include "trellis/reverse_space.cuh"

namespace girih::kernels {

// state += a x, the warp's slots: what reaches an A' that no state of the chain is.
template <typename T, int N, class Token>
__device__ inline void add_apart(const Out<4>& state, const uint32_t (&a)[4], const Token& x,
                                 const TrellisPart& part, const TrellisShape& shape, int slot) {
#pragma unroll 1
  for (int n = 0; n < N; n += 2) {
    Sums<2> sums;
    fill(sums, 0.f);
    add_product<T>(sums, a, x, 0, 8 * n);
    each_element<2>(
        state, part, shape, slot,
        [&](int m, int i, int64_t at) { static_cast<float*>(state.data)[at] += sums.at[m][i]; }, 8 * n);
  }
}

// What a tile's tokens have for the chain that does not hang on it, of the warp's slots.
struct ReverseTile {
  Sums<2> y, slope, bend;
  uint32_t a[4], direct[4];  // as they lie in their tiles: registers are few
  Fit fits[2];
  float2 step;

  template <typename T, class Map, class Space>
  __device__ void load(const Map& phi, const Space& space, int s, int slot) {
    const auto& numbers = space.numbers(s);
    Sums<2> target;
    load_wide<T>(y, space.token(s, Space::kZ), 0, slot);
    load_block(a, space.token(s, Space::kA), 0, slot);
    load_block(direct, space.token(s, Space::kDirect), 0, slot);
    unpack<T>(target, a);
    step = {numbers.step[lane_row()], numbers.step[lane_row() + 8]};
    fits[0] = numbers.fits[lane_row()], fits[1] = numbers.fits[lane_row() + 8];
    activate<T>(phi, y, slope, &bend);
#pragma unroll
    for (int half = 0; half < 2; ++half) to_bend(bend, y, target, fits[half], half);
  }
};

template <typename T, int Tile, class Map>
__device__ inline void run_reverse(const TrellisReverse& p, const TrellisPart& part,
                                   const TrellisReverseSpace<T, Tile>& space, int warp) {
  using Space = TrellisReverseSpace<T, Tile>;
  constexpr int N = Tile / 8, K = Tile / 16, kWarps = Space::kChain;
  const TrellisShape& shape = p.shape;
  const int memory = part.memory, slot = 16 * warp, own_row = lane_row() + 8 * (lane() & 1);
  const Map phi(shape.phi, shape.slots);
  const Columns columns{slot, shape.slots};
  const uint32_t bits[2] = {columns.bits(0), columns.bits(1)};
  const bool positions = p.dfirst[memory].data != nullptr;

  Sums<N> G;
  load_state(G, p.dlast[memory], part, shape, slot);
  // A' of the end: A, unless its chunk is not complete; without a token that of the start.
  const int64_t last = part.of.chunks - 1;
  const bool within = last >= 0 && !chunk_of(shape.grid, part.of, last).complete;
  if (last >= 0 ? !within : !positions) add_state(G, p.dlast_first[memory], part, shape, slot);
  // dA' of a first chunk that goes on is no part of dA.
  if (positions) {
    Sums<N> apart;
    fill(apart, 0.f);
    if (last < 0 || (last == 0 && within)) add_state(apart, p.dlast_first[memory], part, shape, slot);
    store_state(p.dfirst[memory], apart, part, shape, slot);
  }

  // Of narrow memories, which leave registers for it, a tile is made ready while the one before waits.
  constexpr bool kAhead = Tile == 64;
  Operand<K> after;  // G after the chunk
  Turn turn, place;
  unsigned tiles = 0;
  ReverseTile ready;
  const auto make_ready = [&](const Turn& at) {
    wait(space.full() + at.place, at.parity);
    ready.template load<T>(phi, space, at.place, slot);
  };
  if (kAhead && last >= 0) make_ready(turn);
  bool more = last >= 0, open = within;  // tiles; the chunk is not complete
#pragma unroll 1
  for (; more; ++tiles) {
    const int s = turn.place;
    if (!kAhead) make_ready(turn);
    const int marks = space.numbers(s).marks;
    more = !(marks & Space::kEnds);
    turn.next(Space::kStages);
    if (marks & Space::kEnters) round_to_right<T>(after, G);

    // dU
    Sums<2> du;
    product_with<T>(du, space.token(s, Space::kX), after);
    if (marks & Space::kEnters) {
      // Beside the product: what waits for nothing.
      wait(space.taken() + place.place, place.parity ^ 1);
      store_right_blocks(space.gradient(place.place), slot, 0, after);
      arrive_once(space.left() + place.place);
      place.next(Space::kPlaces);
      const float decay = space.numbers(s).decay;
      if (decay != 1.f) scale_rows(G, {decay, decay});
    }
    const ReverseTile tile = ready;
    Sums<2> a, direct;
    unpack<T>(a, tile.a);
    unpack<T>(direct, tile.direct);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        du.at[n][e] = fmaf(e < 2 ? tile.step.x : tile.step.y, du.at[n][e], direct.at[n][e]);
      }
    }
    // The sums of both rows: each lane gets one row's.
    float4* table = space.table(tiles);
    const float3 sums[2] = {products_of(phi, du, tile.y, tile.slope, a, tile.fits[0], 0),
                            products_of(phi, du, tile.y, tile.slope, a, tile.fits[1], 1)};
    const float3 own = sum_of_rows(sums);
    if ((lane() & 2) == 0) table[warp * kTile + own_row] = {own.x, own.y, own.z, 0.f};

    // G <- e^{L_C} G + sum over t of e^{L_t} l_t w_t^T, and the next tile, before the other warps' sums are
    // waited for
    uint32_t left[4];
    load_block_transposed(left, space.token(s, Space::kWeighed), slot, 0);
    add_product<T>(G, left, space.token(s, Space::kW), 0);
    if (kAhead && more) make_ready(turn);

    // dZ, and -J dU
    Sums<2> targets = du;
    barrier_wait(1, 32 * kWarps);
    float3 all{0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 of_warp = table[w * kTile + own_row];
      all.x += of_warp.x, all.y += of_warp.y, all.z += of_warp.z;
    }
    unpack<T>(a, tile.a);
    float3 of_rows[2];
    both_rows(of_rows, all);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to_jacobian_product(phi, targets, tile.y, tile.slope, tile.fits[half], of_rows[half], half);
      to_hessian_product(phi, du, tile.y, tile.slope, tile.bend, a, tile.fits[half], of_rows[half], half);
    }
    // G += dZ^T X
    Operand<1> dz, da;
    round_to<T>(dz, du);
    round_to<T>(da, targets);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      dz.at[0][2 * n] &= bits[n], dz.at[0][2 * n + 1] &= bits[n];
      left[n] = transpose_pairs(dz.at[0][2 * n]), left[2 + n] = transpose_pairs(dz.at[0][2 * n + 1]);
    }
    if (marks & Space::kResumed) {
      add_apart<T, N>(p.dfirst[memory], left, space.token(s, Space::kX), part, shape, slot);
    } else {
      add_product<T>(G, left, space.token(s, Space::kX), 0);
    }
    // The warp's own columns of z and a have been read.
    store_block(space.token(s, Space::kZ), 0, slot, dz.at[0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) da.at[0][i] ^= 0x80008000u;  // -J dU
    store_block(space.token(s, Space::kA), 0, slot, da.at[0]);
    arrive_once(space.written() + s);
    if (open && marks & Space::kLeaves) {
      if (!(marks & Space::kResumed)) add_state(G, p.dlast_first[memory], part, shape, slot);
      open = false;
    }
  }
  store_state(p.dinitial[memory], G, part, shape, slot);
}

}  // namespace girih::kernels

// The scan's chain: both memories from chunk to chunk.
//
// M / 16 warps have the memory. A row of z is spread over all of them; what its norm takes of it goes once
// through shared memory.
#pragma once

#include "trellis/scan_space.cuh"

namespace girih::kernels {

template <typename T, int Tile, class Map>
__device__ inline void run_chain(const TrellisScan& p, const TrellisPart& part,
                                 const TrellisScanSpace<T, Tile>& space, int warp) {
  using Space = TrellisScanSpace<T, Tile>;
  constexpr int N = Tile / 8, K = Tile / 16, kWarps = Space::kChain;
  const TrellisShape& shape = p.shape;
  const Map phi(shape.phi, shape.slots);
  const int slot = 16 * warp;
  const Columns columns{slot, shape.slots};
  const uint32_t bits[2] = {columns.bits(0), columns.bits(1)};
  const bool keeps_fits = p.fit[0].data != nullptr && warp == 0 && (lane() & 2) == 0;
  const bool resumed = p.first[part.memory].data != nullptr;
  const int own_row = lane_row() + 8 * (lane() & 1);

  Sums<N> A;
  load_state(A, p.initial[part.memory], part, shape, slot);
  Operand<K> first;  // A', rounded
  Turn turn, place;
  const auto leave = [&] {
    wait(space.taken() + place.place, place.parity ^ 1);
    store_right_blocks(space.memory(place.place), slot, 0, first);
    arrive_once(space.left() + place.place);
    place.next(Space::kPlaces);
  };
  int marks = part.of.chunks == 0 ? Space::kEnds : 0;
#pragma unroll 1
  for (unsigned tiles = 0; !(marks & Space::kEnds); ++tiles, turn.next(Space::kStages)) {
    const int s = turn.place;
    wait(space.full() + s, turn.parity);
    const auto& numbers = space.numbers(s);
    marks = numbers.marks;

    // A', and A for those who read. Where a chunk goes on in one that was begun before A' is not A.
    const bool enters = marks & Space::kEnters, goes_on = resumed && tiles == 0;
    if (enters) {
      round_to_right<T>(first, A);
      if (marks & Space::kOpen && !goes_on) store_state(p.last_first[part.memory], A, part, shape, slot);
    }
    if (goes_on) {
      leave();
      Sums<N> given;
      load_state(given, p.first[part.memory], part, shape, slot);
      round_to_right<T>(first, given);
      if (marks & Space::kOpen) store_state(p.last_first[part.memory], given, part, shape, slot);
    }

    // Z = X A'^T. Backward finds z as it is kept, in 16 bits: all that is made of it is made of that.
    Sums<2> u, slope, a;
    product_with<T>(u, space.token(s, Space::kX), first);
    // Beside the product: A' is handed on, and A <- e^{L_C} A.
    if (enters) {
      if (!goes_on) leave();
      const float decay = numbers.decay;
      if (decay != 1.f) scale_rows(A, {decay, decay});
    }
    load_wide<T>(a, space.token(s, Space::kA), 0, slot);
    Operand<1> z;
    round_to<T>(z, u);
    unpack<T>(u, z.at[0]);

    // U = J_phi(Z)^T (phi(Z) - a): the sums of a row are those of all warps.
    activate<T>(phi, u, slope);
    Moments* table = space.table(tiles);
    const Moments own = moments_of_rows(phi, u, a, columns);
    if ((lane() & 2) == 0) table[warp * kTile + own_row] = own;
    const float sum_a = numbers.sum_a[own_row];
    barrier_wait(1, 32 * kWarps);
    Moments parts[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) parts[w] = table[w * kTile + own_row];
    const Fit found = fit(phi, parts, sum_a);
    Fit fits[2];
    both_rows(fits, found);
#pragma unroll
    for (int half = 0; half < 2; ++half) to_residual(phi, u, slope, a, fits[half], half);

    // A <- e^{L_C} A - (U * gamma e^{L_C - L})^T X
    Operand<1> rounded;
    round_to<T>(rounded, u);
    uint32_t step[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      rounded.at[0][2 * n] &= bits[n], rounded.at[0][2 * n + 1] &= bits[n];
      step[n] = transpose_pairs(rounded.at[0][2 * n]),
      step[2 + n] = transpose_pairs(rounded.at[0][2 * n + 1]);
    }
    add_product<T>(A, step, space.token(s, Space::kWeighed), 0);

    // For those who read and who keep: u, z in the place of a, and the fits.
    store_block(space.token(s, Space::kU), 0, slot, rounded.at[0]);
    store_block(space.token(s, Space::kA), 0, slot, z.at[0]);
    if (keeps_fits) space.numbers(s).fits[own_row] = found;
    arrive_once(space.written() + s);
  }
  store_state(p.last[part.memory], A, part, shape, slot);
  if (marks & Space::kOpen) return;
  // A chunk has been completed, or there was no token: then A' is what it was.
  if (part.of.chunks == 0 && resumed) load_state(A, p.first[part.memory], part, shape, slot);
  store_state(p.last_first[part.memory], A, part, shape, slot);
}

}  // namespace girih::kernels

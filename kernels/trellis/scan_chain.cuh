// The scan's chain: both memories from chunk to chunk.
//
// M / 16 warps have the memory. A row of z is spread over all of them; what its norm takes of it goes once
// through shared memory.
#pragma once

#include "trellis/scan_space.cuh"

namespace girih::kernels {

template <typename T, int Tile, class Map>
class TrellisScanChain {
  using Space = TrellisScanSpace<T, Tile>;
  using Token = typename Space::Token;
  static constexpr int N = Tile / 8, K = Tile / 16, kWarps = Space::kChain;
  // Where registers allow it a tile's tokens are fetched while the one before comes to its sums: a stage more
  // is full before a chunk's readers give one back.
  static constexpr bool kAhead = Tile == 64;
  static_assert(!kAhead || Space::kStages > Space::kLoaders + Space::kReaders);

  const TrellisScan& p;
  const TrellisPart& part;
  const Space& space;
  const Map phi;
  const int warp, slot, own_row;
  const Columns columns;
  const bool keeps_fits;
  uint32_t lane_place, bits[2];  // see PlacedTile; which columns exist
  Sums<N> A;
  Operand<K> first;  // A', rounded
  Turn turn, place;
  unsigned tiles = 0;
  // Of the tile whose turn it is; X, and the warp's columns of a.
  struct {
    Operand<K> x;
    uint32_t a[4];
    float sum_a, decay;
    int marks;
  } at;

 public:
  __device__ TrellisScanChain(const TrellisScan& p, const TrellisPart& part, const Space& space, int warp)
      : p(p),
        part(part),
        space(space),
        phi(p.shape.phi, p.shape.slots),
        warp(warp),
        slot(16 * warp),
        own_row(lane_row() + 8 * (lane() & 1)),
        columns{slot, p.shape.slots},
        keeps_fits(p.fit[0].data != nullptr && warp == 0 && (lane() & 2) == 0),
        lane_place(sizeof(T) * Token::offset(0, 0, lane() & 15, (lane() >> 4) * 8)),
        bits{columns.bits(0), columns.bits(1)} {
    // Kept, where the compiler would find them anew for every tile.
    asm volatile("" : "+r"(lane_place), "+r"(bits[0]), "+r"(bits[1]));
  }

  __device__ void run() {
    const In<4>& given = p.first[part.memory];
    load_state(A, p.initial[part.memory], part, p.shape, slot);
    bool more = part.of.chunks > 0, open = false;
    if (kAhead && more) fetch();
#pragma unroll 1
    while (more) {
      if constexpr (!kAhead) fetch();
      if (special()) enter_specially();
#pragma unroll 1
      do {  // tiles like most
        open = at.marks & Space::kOpen;
        more = step();
      } while (kAhead && more && !special());
    }
    store_state(p.last[part.memory], A, part, p.shape, slot);
    if (open) return;
    // A chunk has been completed, or there was no token: then A' is what it was.
    if (part.of.chunks == 0 && given.data != nullptr) load_state(A, given, part, p.shape, slot);
    store_state(p.last_first[part.memory], A, part, p.shape, slot);
  }

 private:
  __device__ PlacedTile<Token> token(int stage, typename Space::TokenTile which) const {
    const Token tile = space.token(stage, which);
    return {tile, shared_address(tile.data), lane_place};
  }

  __device__ void fetch() {
    const int s = turn.place;
    wait(space.full() + s, turn.parity);
    const auto& numbers = space.numbers(s);
    at.marks = numbers.marks, at.decay = numbers.decay;
    if constexpr (kAhead) {
      at.sum_a = numbers.sum_a[own_row];
      load_left(at.x, token(s, Space::kX));
      load_block(at.a, token(s, Space::kA), 0, slot);
    }
  }

  // The memory before a chunk to those who read.
  __device__ void leave() {
    wait(space.taken() + place.place, place.parity ^ 1);
    store_right_blocks(space.memory(place.place), slot, 0, first);
    arrive_once(space.left() + place.place);
    place.next(Space::kPlaces);
  }
  // A <- e^{L_C} A
  __device__ void decay() {
    if (at.decay != 1.f) scale_rows(A, {at.decay, at.decay});
  }

  // A chunk that goes on where it was begun before, whose A' is not A, or one that is not complete.
  __device__ bool special() const {
    return (at.marks & Space::kEnters) && (at.marks & (Space::kOpen | Space::kGoesOn));
  }
  __device__ void enter_specially() {
    const bool open = at.marks & Space::kOpen;
    const Out<4>& left = p.last_first[part.memory];
    round_to_right<T>(first, A);
    leave();
    if (at.marks & Space::kGoesOn) {
      Sums<N> given;
      load_state(given, p.first[part.memory], part, p.shape, slot);
      round_to_right<T>(first, given);
      if (open) store_state(left, given, part, p.shape, slot);
    } else {
      store_state(left, A, part, p.shape, slot);
    }
    decay();
    at.marks &= ~Space::kEnters;
  }

  // A tile, whether there is another.
  __device__ bool step() {
    const int s = turn.place;
    const bool enters = at.marks & Space::kEnters, more = !(at.marks & Space::kEnds);
    const auto& numbers = space.numbers(s);
    if (enters) round_to_right<T>(first, A);

    // Z = X A'^T. Backward finds z as it is kept, in 16 bits: all that is made of it is made of that.
    Sums<2> u, slope, a;
    if constexpr (kAhead) {
      product_with<T>(u, at.x, first);
    } else {
      product_with<T>(u, token(s, Space::kX), first);
    }
    // Beside the product.
    if (enters) leave(), decay();
    if constexpr (kAhead) {
      unpack<T>(a, at.a);
    } else {
      load_wide<T>(a, token(s, Space::kA), 0, slot);
    }
    Operand<1> z;
    round_to<T>(z, u);
    unpack<T>(u, z.at[0]);

    // U = J_phi(Z)^T (phi(Z) - a): the sums of a row are those of all warps.
    activate<T>(phi, u, slope);
    Moments* table = space.table(tiles++);
    const Moments own = moments_of_rows(phi, u, a, columns);
    if ((lane() & 2) == 0) table[warp * kTile + own_row] = own;
    const float sum_a = kAhead ? at.sum_a : numbers.sum_a[own_row];
    barrier_wait(1, 32 * kWarps);
    Moments parts[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) parts[w] = table[w * kTile + own_row];
    turn.next(Space::kStages);
    // Beside the sums what comes after them.
    Operand<K> weighed;
    if constexpr (kAhead) {
      load_right(weighed, token(s, Space::kWeighed));
      if (more) fetch();
    }
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
    if constexpr (kAhead) {
      add_product<T>(A, step, weighed);
    } else {
      add_product<T>(A, step, token(s, Space::kWeighed), 0);
    }

    // For those who read and who keep: u, z in the place of a, and the fits.
    store_block(token(s, Space::kU), 0, slot, rounded.at[0]);
    store_block(token(s, Space::kA), 0, slot, z.at[0]);
    if (keeps_fits) space.numbers(s).fits[own_row] = found;
    arrive_once(space.written() + s);
    return more;
  }
};

}  // namespace girih::kernels

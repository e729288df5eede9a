// State warps of the scan: update one memory chunk by chunk.
//
// M / 16 warps hold the memory; a warp has 16 slots. A row of z is distributed over all of these warps, so
// the sums of its norm are exchanged once through shared memory.
#pragma once

#include "trellis/scan_space.cuh"

namespace girih::kernels {

template <typename T, int Tile, class Map>
class TrellisScanChain {
 protected:
  using Space = TrellisScanSpace<T, Tile>;
  using Token = typename Space::Token;
  static constexpr int N = Tile / 8, K = Tile / 16, kWarps = Space::kChain;
  static constexpr bool kWeighted = Map::weighted;
  // If registers allow, the tokens of a tile are loaded to registers while the tile before waits for its
  // sums. This needs another full stage before the output warps release a chunk.
  static constexpr bool kAhead = Tile == 64;
  static_assert(!kAhead || Space::kStages > Space::kLoaders + Space::kReaders);

  const TrellisScan& p;
  const TrellisPart& part;
  const Space& space;
  const Map phi;
  const int warp, slot;
  int row, moment_of_lane;  // of the lane: its upper row, and the moment that it stores
  const Columns columns;
  const std::conditional_t<kWeighted, Weights<2>, NoWeights> weights;
  const bool keeps_fits;
  uint32_t lane_place, bits[2];  // lane offset of PlacedTile; masks of the slots that exist
  Sums<N> A;
  Operand<K> first;  // A', rounded, as a B fragment
  Turn turn, place;
  unsigned tiles = 0;
  // Inputs of the current tile: X, and the warp's slots of a.
  struct {
    Operand<K> x;
    uint32_t a[4];
    typename Space::RowNumbers rows;
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
        row(lane_row()),
        moment_of_lane(lane() & 3),
        columns{slot, p.shape.slots},
        weights(p.weight + part.head * p.shape.M, columns),
        keeps_fits(p.fit[0].data != nullptr && warp == 0 && (lane() & 3) == 0),
        lane_place(sizeof(T) * Token::offset(0, 0, lane() & 15, (lane() >> 4) * 8)),
        bits{columns.bits(0), columns.bits(1)} {
    // Keeps these values in registers; otherwise the compiler recomputes them for every tile.
    asm volatile("" : "+r"(lane_place), "+r"(bits[0]), "+r"(bits[1]), "+r"(row), "+r"(moment_of_lane));
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
      do {  // tiles of ordinary chunks
        open = at.marks & Space::kOpen;
        more = step();
      } while (kAhead && more && !special());
    }
    store_state(p.last[part.memory], A, part, p.shape, slot);
    if (open) return;
    // The last chunk is complete: A' of the next token is A. Without tokens A' does not change.
    if (part.of.chunks == 0 && given.data != nullptr) load_state(A, given, part, p.shape, slot);
    store_state(p.last_first[part.memory], A, part, p.shape, slot);
  }

 protected:
  __device__ PlacedTile<Token> token(int stage, typename Space::TokenTile which) const {
    const Token tile = space.token(stage, which);
    return {tile, shared_address(tile.data), lane_place};
  }

  // Loads the inputs of the current tile to registers. Without a tile it loads unspecified data and does not
  // wait.
  __device__ void fetch(bool is_there = true) {
    const int s = turn.place;
    if (is_there) wait(space.full() + s, turn.parity);
    const auto& numbers = space.numbers(s);
    at.marks = numbers.marks, at.rows = numbers.rows[row];
    if constexpr (kAhead) {
      load_blocks(at.x, token(s, Space::kX));
      load_block(at.a, token(s, Space::kA), 0, slot);
    }
  }

  // Passes the memory before a chunk to the output warps and to the warp that stores memories.
  __device__ void leave() {
    wait(space.taken() + place.place, place.parity ^ 1);
    store_right_blocks(space.memory(place.place), slot, 0, first);
    arrive_once(space.left() + place.place);
    place.next(Space::kPlaces);
  }
  // A <- e^{L_C} A
  __device__ void decay() {
    if (at.rows.decay != 1.f) scale_rows(A, {at.rows.decay, at.rows.decay});
  }

  // The current tile starts a chunk that began in an earlier call (A' is not A), or a chunk that stays
  // incomplete.
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

  // Moments of a row: one entry for each warp. With a weight, which needs further sums, the total over all
  // warps.
  struct RowSums {
    Moments parts[kWeighted ? 1 : kWarps], weighed;
  };
  // Stores the moments over the warp's slots for both rows of the lane, for all warps.
  __device__ void leave_moments(const Sums<2>& y, const Sums<2>& a) const {
    Moments own[2];
    moments_of_rows(own, phi, y, a, columns);
    const int which = moment_of_lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      space.moments(tiles, which, row + 8 * half)[warp ^ which] = moment(own[half], which);
    }
    if constexpr (kWeighted) {
      weighed_moments_of_rows(own, weights, y, a);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        space.weighed_moments(tiles, which, row + 8 * half)[warp ^ which] = moment(own[half], which);
      }
    }
  }
  __device__ static float sum_of_warps(const float* parts) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const float4 four = *reinterpret_cast<const float4*>(parts + w);
      sum += (four.x + four.y) + (four.z + four.w);
    }
    return sum;
  }
  __device__ void take_moments(RowSums (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int which = 0; which < Map::kMoments; ++which) {
        const float* const parts = space.moments(tiles, which, row + 8 * half);
        if constexpr (kWeighted) {
          moment(sums[half].parts[0], which) = sum_of_warps(parts);
          moment(sums[half].weighed, which) =
              sum_of_warps(space.weighed_moments(tiles, which, row + 8 * half));
        } else {
#pragma unroll
          for (int w = 0; w < kWarps; w += 4) {
            const float4 four = *reinterpret_cast<const float4*>(parts + w);
#pragma unroll
            for (int i = 0; i < 4; ++i) moment(sums[half].parts[w + (i ^ which)], which) = moment(four, i);
          }
        }
      }
    }
    ++tiles;
  }

  // From z and a: z rounded to T, y, its slope, and the warp's moments. y is computed from the rounded z,
  // because backward loads the rounded z.
  __device__ void begin(Sums<2>& u, Sums<2>& slope, const Sums<2>& a, Operand<1>& z) const {
    round_to<T>(z, u);
    unpack<T>(u, z.at[0]);
    activate<T>(phi, u, slope);
    leave_moments(u, a);
  }
  // Fits of both rows of the lane.
  __device__ void fit_rows(Fit (&fits)[2], WeightFit (&of_weight)[2], const RowSums (&sums)[2],
                           const float (&sum_a)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kWeighted) {
        fits[half] =
            weighted_fit(phi, sums[half].parts[0], sums[half].weighed, weights.square, of_weight[half]);
      } else {
        fits[half] = fit(phi, sums[half].parts, sum_a[half]);
      }
    }
  }
  // U = J_phi(Z)^T (phi(Z) - a), rounded, and U^T as an A fragment.
  __device__ void finish(Sums<2>& u, const Sums<2>& slope, const Sums<2>& a, const Fit (&fits)[2],
                         Operand<1>& rounded, uint32_t (&transposed)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kWeighted) {
        to_weighted_residual(u, slope, a, weights, fits[half], half);
      } else {
        to_residual(phi, u, slope, a, fits[half], half);
      }
    }
    round_to<T>(rounded, u);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      rounded.at[0][2 * n] &= bits[n], rounded.at[0][2 * n + 1] &= bits[n];
      transposed[n] = transpose_pairs(rounded.at[0][2 * n]);
      transposed[2 + n] = transpose_pairs(rounded.at[0][2 * n + 1]);
    }
  }
  // Stores u, z in place of a, and the fits for the output warps.
  __device__ void write(int s, const Operand<1>& u, const Operand<1>& z, const Fit (&fits)[2],
                        const WeightFit (&of_weight)[2]) const {
    store_block(token(s, Space::kU), 0, slot, u.at[0]);
    store_block(token(s, Space::kA), 0, slot, z.at[0]);
    if (keeps_fits) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        space.numbers(s).fits[row + 8 * half] = fits[half];
        if constexpr (kWeighted) space.weight_fits(s)[row + 8 * half] = of_weight[half];
      }
    }
    arrive_once(space.written() + s);
  }

  // Processes a tile. Returns whether there is another.
  __device__ bool step() {
    const int s = turn.place;
    const bool enters = at.marks & Space::kEnters, more = !(at.marks & Space::kEnds);
    if (enters) round_to_right<T>(first, A);

    // Z = X A'^T
    Sums<2> u, slope, a;
    if constexpr (kAhead) {
      product_with<T>(u, at.x, first);
    } else {
      product_with<T>(u, token(s, Space::kX), first);
    }
    // Overlaps with the product.
    if (enters) leave(), decay();
    if constexpr (kAhead) {
      unpack<T>(a, at.a);
    } else {
      load_wide<T>(a, token(s, Space::kA), 0, slot);
    }
    weigh(a, weights);
    Operand<1> z;
    begin(u, slope, a, z);
    RowSums sums[2];
    const float sum_a[2] = {at.rows.sum_a[0], at.rows.sum_a[1]};
    barrier_wait(1, 32 * kWarps);
    take_moments(sums);
    turn.next(Space::kStages);
    // Overlaps with the sums: the operands of the next products.
    Operand<K> weighed;
    if constexpr (kAhead) {
      load_right(weighed, token(s, Space::kWeighed));
      fetch(more);
    }
    Fit fits[2];
    WeightFit of_weight[2];
    fit_rows(fits, of_weight, sums, sum_a);
    Operand<1> rounded;
    uint32_t step[4];
    finish(u, slope, a, fits, rounded, step);

    // A <- e^{L_C} A - (U * gamma e^{L_C - L})^T X
    if constexpr (kAhead) {
      add_product<T>(A, step, weighed);
    } else {
      add_product<T>(A, step, token(s, Space::kWeighed), 0);
    }

    write(s, rounded, z, fits, of_weight);
    return more;
  }
};

}  // namespace girih::kernels

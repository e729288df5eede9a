// State warps of the scan for chunks of at most one tile: they compute one chunk ahead.
//
// The z of the next chunk depends on the current u only through a product with 16 x 16 scores, which producer
// warps compute:
//
//     A <- e^{L_C} A + U^T X~            X~_t = -gamma_t e^{L_C - L_t} x_t
//     Z_next = e^{L_C} X_next A^T + (X_next X~^T) U
//
// The term with A is computed before U is. So neither the rounding of the next A nor a product with the next
// A is on the critical path between one U and the next.
#pragma once

#include "trellis/scan_chain.cuh"

namespace girih::kernels {

template <typename T, int Tile, class Map>
class TrellisShortChain : TrellisScanChain<T, Tile, Map> {
  using Chain = TrellisScanChain<T, Tile, Map>;
  using Chain::A, Chain::first, Chain::at, Chain::turn, Chain::p, Chain::part, Chain::space, Chain::slot;
  using Chain::K, Chain::kWarps, Chain::N, Chain::phi, Chain::token;
  using typename Chain::Space;
  static_assert(Space::kLooksAhead && Chain::kAhead);

  // Of the current chunk: y, its slope and the rounded z. `at` has a and the scalars of the current chunk,
  // and X of the next chunk.
  Sums<2> y, slope;
  Operand<1> kept;
  // Masks of the lane's slots, as rows of U^T. The masked values are zero already; the mask gives U^T new
  // registers for the products with U^T as A fragment. Without it the compiler copies the registers for every
  // product, because U as B fragment needs another register order.
  uint32_t slots[2];

 public:
  __device__ TrellisShortChain(const TrellisScan& p, const TrellisPart& part, const Space& space, int warp)
      : Chain(p, part, space, warp) {
#pragma unroll
    for (int i = 0; i < 2; ++i) slots[i] = slot + lane_row() + 8 * i < p.shape.slots ? ~0u : 0u;
    asm volatile("" : "+r"(slots[0]), "+r"(slots[1]));
  }

  __device__ void run() {
    const int chunks = static_cast<int>(part.of.chunks);
    // 1: the last chunk is incomplete
    const int open = chunks > 0 && !chunk_of(p.shape.grid, part.of, chunks - 1).complete ? 1 : 0;
    const bool resumed = p.first[part.memory].data != nullptr;
    load_state(A, p.initial[part.memory], part, p.shape, slot);
    if (chunks > 0) begin_first(chunks, resumed);
#pragma unroll 1
    for (int left = chunks; left > 0;) {
      if (left == open) leave_first(chunks == 1 && resumed);
#pragma unroll 1
      do {  // complete chunks
        step(left);
      } while (--left > open);
    }
    store_state(p.last[part.memory], A, part, p.shape, slot);
    // The last chunk is complete: A' of the next token is A. Without tokens A' does not change.
    if (open == 0) leave_first(chunks == 0 && resumed);
  }

 private:
  // Stores A' of the chunk of the next token: the caller's A', or A.
  __device__ void leave_first(bool given) const {
    Sums<N> A = this->A;
    if (given) load_state(A, p.first[part.memory], part, p.shape, slot);
    store_state(p.last_first[part.memory], A, part, p.shape, slot);
  }

  // Computes z of the chunk in which the sequence starts. If that chunk began in an earlier call, A' is not
  // A.
  __device__ void begin_first(int chunks, bool resumed) {
    Sums<N> given = A;
    if (resumed) load_state(given, p.first[part.memory], part, p.shape, slot);
    round_to_right<T>(first, given);
    wait(space.full(), 0);
    load_blocks(at.x, token(0, Space::kX));
    Sums<2> z;
    multiply(z);
    take_targets();
    begin_next(z);
    fetch(chunks > 1);
  }

  // z = X A'^T with X from registers. One accumulator is enough: nothing waits for this product.
  __device__ void multiply(Sums<2>& z) const {
    fill(z, 0.f);
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) mma<T>(z.at[j], at.x.at[k], first.at[k][2 * j], first.at[k][2 * j + 1]);
    }
  }

  // Loads the inputs of the current chunk, which is full.
  __device__ void take_targets() {
    at.rows = space.numbers(turn.place).rows[this->row];
    load_block(at.a, token(turn.place, Space::kA), 0, slot);
  }
  // Computes the current chunk up to the moments of the warp.
  __device__ void begin_next(const Sums<2>& z) {
    Sums<2> a;
    unpack<T>(a, at.a);
    weigh(a, this->weights);
    y = z;
    this->begin(y, slope, a, kept);
  }
  // Loads X of the next chunk; unspecified data if there is none.
  __device__ void fetch(bool has_next) {
    Turn next = turn;
    next.next(Space::kStages);
    if (has_next) wait(space.full() + next.place, next.parity);
    load_blocks(at.x, token(next.place, Space::kX));
  }

  // Processes a chunk, with `left` chunks to go, from its moments to the moments of the next chunk. After the
  // last chunk the results of the next chunk are unspecified and unused.
  __device__ void step(int left) {
    const int s = turn.place;
    const float decay = at.rows.decay;

    // Overlaps with the exchange of moments: the term of A in the next z, and the rounded A.
    Sums<2> z, a;
    round_to_right<T>(first, A);
    multiply(z);
    turn.next(Space::kStages);
    const uint4 scores = space.scores(turn.place);
    barrier_wait(1, 32 * kWarps);
    typename Chain::RowSums sums[2];
    this->take_moments(sums);
    this->leave();
    scale_rows(A, {decay, decay});
    scale_rows(z, {decay, decay});
    Fit fits[2];
    WeightFit of_weight[2];
    this->fit_rows(fits, of_weight, sums, at.rows.sum_a);
    Operand<1> rounded;
    uint32_t transposed[4];
    unpack<T>(a, at.a);
    weigh(a, this->weights);
    take_targets();
    this->finish(y, slope, a, fits, rounded, transposed);

    const uint32_t factor[4] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
    for (int j = 0; j < 2; ++j) mma<T>(z.at[j], factor, transposed[j], transposed[2 + j]);
    // Loads the operand of A's update after the next z is computed, and before an output warp may overwrite
    // the tile with o.
    Operand<K> weighed;
    load_right(weighed, token(s, Space::kWeighed));
    this->write(s, rounded, kept, fits, of_weight);
    uint32_t of_slots[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of_slots[i] = transposed[i] & slots[i % 2];
    add_product<T>(A, of_slots, weighed);
    begin_next(z);
    fetch(left > 2);
  }
};

}  // namespace girih::kernels

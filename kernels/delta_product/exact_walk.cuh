// A block's walk through its tokens: the thread's part of the state, and what a turn does with it.
#pragma once

#include "delta_product/between.h"
#include "delta_product/exact_slots.cuh"
#include "delta_product/pieces.h"

namespace girih::kernels::delta_product::by_token {

// x summed over the lanes that share columns, for all of them.
__device__ inline float over_lanes(float x) {
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// The thread's part of the state: two columns, kPacks packs of their rows.
template <int Tile>
struct Columns {
  static constexpr int kPacks = ScanSizes<Tile>::kPacks;
  using Row = Pack<4>[kPacks];

  Pack<4> at[kCols][kPacks];

  template <class F>
  __device__ void each(const F& f) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(at[c][i].at[e], c, i, e);
      }
    }
  }
  // The lane's terms of S^T x, in two sums at a time: one alone is a chain twice as long.
  __device__ void dot(float (&sums)[kCols], const Row& x) const {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e & 1] = fmaf(at[c][i].at[e], x[i].at[e], sum[e & 1]);
      }
      sums[c] = sum[0] + sum[1];
    }
  }
  // S <- S + x y^T
  __device__ void add(const Row& x, const float (&y)[kCols]) {
    each([&](float& s, int c, int i, int e) { s = fmaf(x[i].at[e], y[c], s); });
  }
  __device__ void scale(float by) {
    each([&](float& s, int, int, int) { s *= by; });
  }
};

// A row's packs of the thread.
template <int Packs>
__device__ inline void take(Pack<4> (&row)[Packs], const float* from) {
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    row[i] = load<4>(from + 4 * (static_cast<int>(threadIdx.x) % kLanes) + 4 * kLanes * i);
  }
}

template <int Tile, bool Reverse>
struct ExactWalk {
  using Sizes = ScanSizes<Tile>;
  using Row = typename Columns<Tile>::Row;

  const DeltaExactScan& p;
  const DeltaExactShape& shape;
  const DeltaPieces& pieces;
  const Walked& here;
  const int lane, own, col, D;  // own, col: the first of the thread's columns, of the block's and of all
  Columns<Tile> S;
  // A read's and a step's row: in place of q and of the factor of the sum come those of the next turn.
  Row q, factor;
  // Where the walk is: the piece, and how many of its tokens are to come.
  const int position;
  Place place;
  int left;
  bool begins = true;    // the walk
  bool applies = false;  // the function between chunks, after the last token's reads
  // Rows to write, of the turn's token: forward of the one before for o.
  float *o = nullptr, *u = nullptr;
  const int64_t next_u;
  const bool writes_o, writes_u;

  __device__ ExactWalk(const DeltaExactScan& p, const Walked& here, int slab)
      : p(p),
        shape(p.shape),
        pieces(p.shape.pieces),
        here(here),
        lane(static_cast<int>(threadIdx.x) % kLanes),
        own(static_cast<int>(threadIdx.x) / kLanes * kCols),
        col(slab + own),
        D(in_fours(p.shape.D)),
        position(position_of(pieces, here.sequence)),
        place(pieces, delta_product::first_piece(pieces, here.sequence),
              position + static_cast<int64_t>(Reverse && here.tokens > 0 ? here.tokens - 1 : 0)),
        left(Reverse ? place.at + 1 : place.length - place.at),
        next_u(Reverse ? -p.u.stride[1] : p.u.stride[1]),
        writes_o(lane < kCols && col + lane < p.shape.V),
        writes_u(p.u.data != nullptr && lane == 0 && col < in_fours(p.shape.V)) {
    const int64_t first_token = here.sequence.start + (Reverse ? here.tokens - 1 : 0);
    if (!Reverse) {
      o = kernels::at<float>(p.o, here.sequence.batch, first_token - 1, here.head * here.group,
                             col + (lane & 1));
    }
    if (p.u.data != nullptr) {
      u = kernels::at<float>(p.u, here.sequence.batch,
                             first_token * p.shape.n + (Reverse ? p.shape.n - 1 : 0), here.head, col);
    }
  }

  __device__ void load_state();
  __device__ void store_state();
  __device__ void begin_token(const Turn& turn, float decay);
  template <bool Reads, bool Steps>
  __device__ void visit(const float* slot, const float* next, unsigned member, bool has_read, float decay);
  __device__ void take_turn(const Turn& turn, const float* slot, const float* next);

  __device__ int row_at(int i, int e) const { return 4 * lane + 4 * kLanes * i + e; }
  __device__ void take_both(const float* slot) {
    take(q, slot);
    take(factor, slot + (Reverse ? Sizes::kKey : Sizes::kWrite));
  }

 private:
  template <class Place, class F>
  __device__ void each_place(Place* first, int64_t by_row, int64_t by_col, const F& f);
  // A piece's state among those of all, the thread's part: f(pack, where it is).
  template <class Float, class F>
  __device__ void each_kept(Float* states, int64_t number, const F& f) {
    Float* const at = states + ((number * shape.heads + here.head) * shape.V + col) * D;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
#pragma unroll
      for (int i = 0; i < Sizes::kPacks; ++i) {
        if (col + c < shape.V && row_at(i, 0) < D) f(S.at[c][i], at + c * D + row_at(i, 0));
      }
    }
  }
  __device__ void publish(int64_t number) {
    if (p.published == nullptr) return;
    each_kept(p.published, number, [](const Pack<4>& part, float* at) { store<4>(at, part); });
  }
};

// f(element, its place) for those of the thread's elements that exist, in a head's state that begins at
// `first`.
template <int Tile, bool Reverse>
template <class Place, class F>
__device__ inline void ExactWalk<Tile, Reverse>::each_place(Place* first, int64_t by_row, int64_t by_col,
                                                            const F& f) {
  first += 4 * lane * by_row + col * by_col;
  S.each([&](float& s, int c, int i, int e) {
    if (row_at(i, e) < shape.D && col + c < shape.V) f(s, first[(4 * kLanes * i + e) * by_row + c * by_col]);
  });
}

template <int Tile, bool Reverse>
__device__ inline void ExactWalk<Tile, Reverse>::load_state() {
  S.each([&](float& s, int, int, int) { s = 0.f; });
  if (p.initial.data == nullptr) return;
  each_place(static_cast<const float*>(p.initial.data) + here.sequence.index * p.initial.stride[0] +
                 here.head * p.initial.stride[1],
             p.initial.stride[2], p.initial.stride[3], [](float& s, const float& at) { s = at; });
}

template <int Tile, bool Reverse>
__device__ inline void ExactWalk<Tile, Reverse>::store_state() {
  each_place(static_cast<float*>(p.final.data) + here.sequence.index * p.final.stride[0] +
                 here.head * p.final.stride[1],
             p.final.stride[2], p.final.stride[3], [](float s, float& at) { at = s; });
}

// Before a token's first turn: in reverse the decay after the token, at a piece's end or start the next
// piece, what lies between chunks, and the state to be kept.
template <int Tile, bool Reverse>
__device__ inline void ExactWalk<Tile, Reverse>::begin_token(const Turn& turn, float decay) {
  if (Reverse) {
    if (p.decay != nullptr && turn.token > 0) S.scale(decay);
    if (begins || left == 0) {
      if (!begins) {
        place.retreat(pieces);
        left = place.length;
      }
      if (pieces.between != Between::none && place.completes_chunk(pieces)) {
        each_kept(p.states, place.number + 1, [&](Pack<4>& part, const float* at) {
          const Pack<4> before = load<4>(at);
#pragma unroll
          for (int e = 0; e < 4; ++e) part.at[e] *= between_slope(pieces.between, before.at[e]);
        });
      }
      publish(place.number);
      begins = false;
    }
  } else if (begins || left == 0) {
    if (!begins) {
      place.advance(pieces);
      left = place.length;
      applies = pieces.between != Between::none && place.part == 0;
    }
    if (turn.token < here.tokens || applies) publish(place.number);
    begins = false;
  }
  --left;
}

// forward   o = scale S^T q            reverse   S <- S + scale q do^T
// forward   u = w - e^g S^T b,         S <- e^g S + k u^T
// reverse   du = S^T k,                S <- S - b du^T
template <int Tile, bool Reverse>
template <bool Reads, bool Steps>
__device__ inline void ExactWalk<Tile, Reverse>::visit(const float* slot, const float* next, unsigned member,
                                                       bool has_read, float decay) {
  const float2 given = *reinterpret_cast<const float2*>(slot + Sizes::kValue + own);
  const float value[kCols] = {given.x, given.y};
  [[maybe_unused]] float read[kCols], sum[kCols];
  [[maybe_unused]] Row to;
  if constexpr (Steps) take(to, slot + (Reverse ? Sizes::kWrite : Sizes::kKey));
  if constexpr (Reads && Reverse) {
    const float scaled[kCols] = {shape.scale * value[0], shape.scale * value[1]};
    S.add(q, scaled);
  }
  if constexpr (Steps) S.dot(sum, factor);
  if constexpr (Reads && !Reverse) S.dot(read, q);
  take_both(next);
  if constexpr (Steps) {
    if constexpr (!Reverse) S.scale(decay);
    float rows[kCols], change[kCols];
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      sum[c] = over_lanes(sum[c]);
      rows[c] = Reverse ? sum[c] : fmaf(-decay, sum[c], value[c]);
      change[c] = Reverse ? -rows[c] : rows[c];
    }
    S.add(to, change);
    if (writes_u) *reinterpret_cast<float2*>(u) = make_float2(rows[0], rows[1]);
    u += next_u;
  }
  if constexpr (Reads && !Reverse) {
    // Lanes 0 and 1 get the sum of a column each.
    const bool odd = (lane & 1) != 0;
    float sum_of = (odd ? read[1] : read[0]) + __shfl_xor_sync(~0u, odd ? read[0] : read[1], 1);
    sum_of += __shfl_xor_sync(~0u, sum_of, 2);
    sum_of += __shfl_xor_sync(~0u, sum_of, 4);
    if (writes_o && has_read) o[member * p.o.stride[2]] = shape.scale * sum_of;
  }
}

// A turn of a token: it reads, or steps, or both. Forward, where the state changes between the last token's
// reads and the next step, or no token follows, they are apart.
template <int Tile, bool Reverse>
__device__ inline void ExactWalk<Tile, Reverse>::take_turn(const Turn& turn, const float* slot,
                                                           const float* next) {
  const unsigned first_step = here.group - 1;  // the turn of a token's last read and first step
  const float decay = slot[Sizes::kDecay];
  if (turn.at == 0) begin_token(turn, decay);
  if (turn.at < first_step) {
    visit<true, false>(slot, next, turn.at, turn.token > 0, 1.f);
  } else if (turn.at > first_step) {
    visit<false, true>(slot, next, 0, false, 1.f);
  } else if (!Reverse && (applies || turn.token == here.tokens)) {
    visit<true, false>(slot, slot, turn.at, true, 1.f);
    if (applies) S.each([&](float& s, int, int, int) { s = between(pieces.between, s); });
    applies = false;
    if (turn.token < here.tokens) visit<false, true>(slot, next, 0, false, decay);
  } else {
    visit<true, true>(slot, next, turn.at, turn.token > 0, decay);
  }
  if (turn.at == first_step && !Reverse) o += p.o.stride[1];
}

}  // namespace girih::kernels::delta_product::by_token

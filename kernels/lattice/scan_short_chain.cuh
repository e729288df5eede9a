// The chain of scan_short.cuh: S and H of a chunk, and the memory after it, chunk by chunk.
//
// It has the time of one chunk after another, so it does no more than has to be between S and the next: X
// stays as it is, s_i = rho_i x_i, and the length of the next x_i is there with its steps:
//
//     sigma_i = rho_i x_i.u_i          alpha_i = m_C - sigma_i          b_i = alpha_i rho_i
//     X <- b X + U          |x_i|^2 = b_i^2 x_i.x_i + 2 b_i x_i.u_i + u_i.u_i          rho_i <- 1 / |x_i|
//
// x_i.x_i is found anew in every chunk, where the block waits for H: rounding does not add up. Where the
// terms of the length cancel it is found of the x_i themselves.
#pragma once

#include "lattice/scan_short_ring.cuh"
#include "pipe/roots.h"

namespace girih::kernels::lattice {

// A tile whose addresses for ldmatrix hang on two numbers that are at hand, those of the ring's start and of
// the lane's place: behind a barrier the compiler would work them out again.
template <class Tile>
struct PlacedTile : Tile {
  uint32_t start, place;  // in bytes; place: of offset(0, 0, lane() & 15, (lane() >> 4) * 8)
  __device__ uint32_t address(int row, int col, int, int) const {
    constexpr int kBytes = sizeof(typename Tile::Element);
    return start + row * Tile::kCols * kBytes + (place ^ (col * kBytes));
  }
};

template <class Ring>
class ShortScanChain {
  using T = typename Ring::T;
  using S = typename Ring::S;
  using Factor = Operand<4>;
  static constexpr bool kDecode = Ring::kObjective == LatticeObjective::decode,
                        kEncode = Ring::kObjective == LatticeObjective::encode;

  const LatticeScan& p;
  const Ring& ring;
  const ChunkedSequence& of;
  const int head, warp, first;
  const uint32_t ring_start, lane_place;  // see PlacedTile
  Sums<8> X;
  float rho[2] = {1.f, 1.f};
  Factor rounded;  // encode: the warp's S
  // Of a chunk, fetched before there is S.
  Factor rows;         // decode: K; encode: V
  uint32_t values[4];  // decode: the warp's columns of -V
  uint32_t keys[4];    // K^T of the warp's vectors, and what weighs its columns
  float2 weights[2];
  // What the chunk before leaves to others, until that costs no time. No stage: nothing.
  struct {
    float alpha[2], rho[2];
    int stage = -1;
  } behind;

 public:
  __device__ ShortScanChain(const LatticeScan& p, const Ring& ring, int warp)
      : p(p),
        ring(ring),
        of(ring.block().of),
        head(ring.block().head),
        warp(warp),
        first(16 * warp),
        ring_start(opaque(shared_address(ring.base))),
        lane_place(opaque(sizeof(T) * S::Keys::offset(0, 0, lane() & 15, (lane() >> 4) * 8))) {}

  __device__ void run() {
    load_vectors(X, p.start.memory, of.sequence.index, head, p.shape, first);
    const int chunks = static_cast<int>(of.chunks);
    const int open = chunks > 0 && !chunk_of(p.shape.grid, of, chunks - 1).complete ? 1 : 0;  // chunks
    bool resumed = of.begun > 0;
    Turn turn;
    if (chunks > 0) {
      wait(ring.full(), 0);
      publish(0);
      fetch(0);
      turn_values();
    }
    const auto pass = [&](auto special, int left, bool complete) {
      Turn next = turn;  // of the last chunk itself: what is fetched of it once more nobody uses
      if (left > 1) next.next(Ring::kStages);
      step<decltype(special)::value>(turn.place, complete, resumed, left > 1, next);
      turn = next;
    };
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
      if (!resumed) {
        // Chunks like most are a loop of their own, which has nothing to ask.
#pragma unroll 1
        for (; left > open; --left) pass(std::false_type(), left, true);
        if (left == 0) break;
      }
      pass(std::true_type(), left, left > open);
      resumed = false;
    }
    leave();
    end(chunks, open);
  }

 private:
  template <class Tile>
  __device__ PlacedTile<Tile> placed(const Tile& tile) const {
    const auto at = reinterpret_cast<const unsigned char*>(tile.data) - ring.base;
    return {tile, ring_start + static_cast<uint32_t>(at), lane_place};
  }

  // S, rounded.
  __device__ void publish(int stage) {
    const auto memory = placed(ring.memory(stage));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Sums<2> s;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s.at[n][e] = rho[e / 2] * X.at[2 * i + n][e];
      }
      pack<T>(rounded.at[i], s);
      store_block(memory, first, 16 * i, rounded.at[i]);
    }
  }

  // K and V of a chunk are there.
  __device__ void fetch(int stage) {
    const auto k = ring.tokens(stage, Ring::k), v = ring.tokens(stage, Ring::v);
    const float* const from = ring.numbers(stage).weights;
    if constexpr (kDecode || kEncode) {
      const auto tile = placed(kDecode ? k : v);
#pragma unroll
      for (int i = 0; i < 4; ++i) load_block(rows.at[i], tile, 0, 16 * i);
    }
    if constexpr (kDecode) load_block(values, placed(v), 0, first);
    load_block_transposed(keys, k, first, 0);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      weights[n] = *reinterpret_cast<const float2*>(from + 8 * n + lane_col());
    }
  }
  __device__ void turn_values() {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] ^= 0x80008000;  // both signs
  }
  // But for encode: W^T E_C of the warp's vectors.
  __device__ void weigh(uint32_t (&w)[4]) const {
    Sums<2> x;
    unpack<T>(x, keys);
    scale_columns(x, [&](int n) { return weights[n]; });
    pack<T>(w, x);
  }

  // Special: a chunk that is not complete, or resumed.
  template <bool Special>
  __device__ void step(int stage, bool complete, bool resumed, bool more, const Turn& next) {
    uint32_t w[4];  // W^T E_C of the warp's vectors
    if constexpr (kDecode) make_h(stage);
    const auto h = placed(ring.tokens(stage, Ring::v));
    uint32_t right[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices_transposed(right[i], h.address(0, 16 * i, lane() & 15, (lane() >> 4) * 8));
    }
    Sums<2> a;  // encode: (H S)^T
    if constexpr (kEncode) make_a(a);
    const float kept = !Special || complete ? ring.numbers(stage).kept() : 0.f;
    // While H, or a, is on its way: what the next chunk has of its tokens, x.x, and what the chunk before has
    // left.
    wait(ring.full() + next.place, next.parity);
    if constexpr (!kEncode) {
      weigh(w);
      fetch(next.place);
    }
    float square[2][2];
    lane_dots(square, X, X);
    leave();
    if constexpr (kEncode) make_w(w, a);
    // U^T = (W E_C)^T H
    Sums<8> U;
    fill(U, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<T>(U.at[2 * i], w, right[i][0], right[i][1]);
      mma<T>(U.at[2 * i + 1], w, right[i][2], right[i][3]);
    }
    if constexpr (kEncode) fetch(next.place);

    float along[2], steps[2], squares[2], alpha[2], by[2], length[2], end[2];  // end: 1 / |x|, or 0
    add_lanes(squares, square);
    dots(along, X, U);
    dots(steps, U, U);
    bool cancels = false;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      alpha[j] = fmaf(-rho[j], along[j], kept), by[j] = alpha[j] * rho[j];
      length[j] = fmaf(by[j], fmaf(by[j], squares[j], 2.f * along[j]), steps[j]);
      cancels |= length[j] < kLeastLeft * fmaf(by[j] * by[j], squares[j], steps[j]);
    }
    if (Special) {
      move_with_care(end, U, by, stage, complete, resumed);
    } else {
      // The vote's answer is not waited for.
      const bool any = __any_sync(~0u, cancels);
#pragma unroll
      for (int j = 0; j < 2; ++j) end[j] = rho[j] = length[j] > 0.f ? inverse_root(length[j]) : 0.f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) X.at[n][e] = fmaf(by[e / 2], X.at[n][e], U.at[n][e]);
      }
      if (any) measure(end, U, alpha);
    }
    if (more) {
      if constexpr (kDecode) turn_values();
      publish(next.place);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) behind.alpha[j] = alpha[j], behind.rho[j] = end[j];
    behind.stage = stage;
  }

  __device__ void leave() {
    if (behind.stage < 0) return;
    if (p.memories != nullptr && (lane() & 3) == 0) {
      auto& numbers = ring.numbers(behind.stage);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        numbers.alpha[first + lane_row() + 8 * j] = behind.alpha[j];
        numbers.rho[first + lane_row() + 8 * j] = behind.rho[j];
      }
    }
    arrive_once(ring.written() + behind.stage);
  }

  // Of the squares' sum, what is left of it at least where its terms are trusted: rounding is then below
  // 2^-13 of the length.
  static constexpr float kLeastLeft = 0x1p-8f;

  __device__ static void dots(float (&to)[2], const Sums<8>& x, const Sums<8>& y) {
    const float2 dots = row_dots(x, y);
    to[0] = dots.x, to[1] = dots.y;
  }

  // The lane's parts of x.y of its two rows, and their sums.
  __device__ static void lane_dots(float (&to)[2][2], const Sums<8>& x, const Sums<8>& y) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i / 2][i % 2] = 0.f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i / 2][i % 2] = fmaf(x.at[n][i], y.at[n][i], to[i / 2][i % 2]);
    }
  }
  __device__ static void add_lanes(float (&to)[2], const float (&parts)[2][2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) to[j] = sum_over_row(parts[j][0] + parts[j][1]);
  }

  // decode: H = K S^T - V in the place of V, 16 columns a warp.
  __device__ void make_h(int stage) const {
    const int col = 16 * warp;
    const auto h = placed(ring.tokens(stage, Ring::v));
    const auto memory = placed(ring.memory(stage));
    // In two sums, which are there sooner than one.
    Sums<2> sum, half;
    unpack<T>(sum, values);
    fill(half, 0.f);
    barrier_wait(1, S::kThreads);  // S is there
    uint32_t s[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_matrices_transposed(s[i], memory.address(16 * i, col, lane() & 15, (lane() >> 4) * 8));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<T>((i % 2 ? half : sum).at[0], rows.at[i], s[i][0], s[i][1]);
      mma<T>((i % 2 ? half : sum).at[1], rows.at[i], s[i][2], s[i][3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.at[n][e] += half.at[n][e];
    }
    uint32_t a[4];
    pack<T>(a, sum);
    store_block(h, 0, col, a);
    barrier_wait(1, S::kThreads);  // H is there
  }

  // encode: (H S)^T, of which the warp has all in registers.
  __device__ void make_a(Sums<2>& a) const {
    Sums<2> half;
    fill(a, 0.f);
    fill(half, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) add_product_of_rows<T>(i % 2 ? half : a, rounded.at[i], rows.at[i]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a.at[n][i] += half.at[n][i];
    }
  }
  // W = w (a - k)
  __device__ void make_w(uint32_t (&w)[4], Sums<2>& a) const {
    Sums<2> key;
    unpack<T>(key, keys);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a.at[n][i] -= key.at[n][i];
    }
    scale_columns(a, [&](int n) { return weights[n]; });
    pack<T>(w, a);
  }

  // rho by the x_i themselves. Where one is 0, s_i stays: U is -alpha s_i there.
  __device__ void measure(float (&end)[2], const Sums<8>& U, const float (&alpha)[2]) {
    float square[2], back[2];
    dots(square, X, X);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      end[j] = square[j] > 0.f ? rsqrtf(square[j]) : 0.f, rho[j] = square[j] > 0.f ? end[j] : 1.f;
      back[j] = -1.f / alpha[j];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!(square[e / 2] > 0.f)) X.at[n][e] = U.at[n][e] * back[e / 2];
      }
    }
  }

  // X and rho by the x_i themselves. A chunk that is not complete leaves them as they are, and x as Delta.
  __device__ void move_with_care(float (&end)[2], Sums<8>& U, const float (&by)[2], int stage, bool complete,
                                 bool resumed) {
    const auto& numbers = ring.numbers(stage);
    if (resumed) {
      const float open = numbers.open();
      for_elements(U, p.start.step, of.sequence.index, head, p.shape, first,
                   [&](float& u, const float& step, int) { u = fmaf(open, step, u); });
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) U.at[n][e] = fmaf(by[e / 2], X.at[n][e], U.at[n][e]);
    }
    if (!complete) {
      end[0] = end[1] = 1.f;
      if (p.end.step.data != nullptr) store_vectors(p.end.step, U, of.sequence.index, head, p.shape, first);
      if (threadIdx.x == 0 && p.end.decay.data != nullptr) {
        store_any(p.end.decay, numbers.sum() / kLog2E, of.sequence.index, static_cast<int64_t>(head));
      }
      return;
    }
    float square[2];
    dots(square, U, U);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      end[j] = square[j] > 0.f ? rsqrtf(square[j]) : 0.f;
      rho[j] = square[j] > 0.f ? end[j] : rho[j];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) X.at[n][e] = square[e / 2] > 0.f ? U.at[n][e] : X.at[n][e];
    }
  }

  // Where the sequence ends: in a chunk (move_with_care() has stored how far), after one, or where it began.
  __device__ void end(int chunks, int open) {
    const int64_t sequence = of.sequence.index;
    if (chunks > open) {
      float square[2];
      dots(square, X, X);
      scale_rows(X, {square[0] > 0.f ? rsqrtf(square[0]) : 0.f, square[1] > 0.f ? rsqrtf(square[1]) : 0.f});
    }
    store_vectors(p.end.memory, X, sequence, head, p.shape, first);
    if (open == 0 && p.end.step.data != nullptr) {
      fill(X, 0.f);
      if (chunks == 0) load_vectors(X, p.start.step, sequence, head, p.shape, first);
      store_vectors(p.end.step, X, sequence, head, p.shape, first);
    }
    if (threadIdx.x != 0) return;
    if (open == 0 && p.end.decay.data != nullptr) {
      float decay = 0.f;
      if (chunks == 0 && p.start.decay.data != nullptr) decay = load_any(p.start.decay, sequence, head);
      store_any(p.end.decay, decay, sequence, static_cast<int64_t>(head));
    }
    if (head == 0 && p.last_position != nullptr) {
      p.last_position[sequence] = (of.begun + of.sequence.end - of.sequence.start) % p.shape.grid.size;
    }
  }
};

}  // namespace girih::kernels::lattice

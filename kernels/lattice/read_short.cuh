// read.cuh by a single warp, which processes the chunk's 64 vectors 16 at a time, with the chunk's 16 tokens
// as columns (within.cuh):
//
//     F_tj = e^{L_t - L_j} step_j          W_j = step_j c_j
//     N^T = c^T (tril(G, -1) F)^T + e^{L} Delta^T H^T          q~ = q y
//     O = sum over vectors of (q~ (m - sigma)) S^T + (q~ e^{L}) Delta^T, and (tril(q~ c^T) F) H
//
// Steps and decays stay in fp32; only c, G F and q~ are rounded.
#pragma once

#include "lattice/lengths.cuh"
#include "lattice/scan_short_ring.cuh"
#include "pipe/roots.h"

namespace girih::kernels::lattice {

template <class Ring>
class ShortReader {
  using T = typename Ring::T;
  using S = typename Ring::S;
  static constexpr bool kEncode = Ring::kObjective == LatticeObjective::encode;
  static constexpr float kLift = lift<T>();

  const LatticeScan& scan;
  const LatticeRead& p;
  const Ring& ring;

 public:
  __device__ ShortReader(const ShortScan& p, const Ring& ring) : scan(p.scan), p(p.read), ring(ring) {}

  // Processes every kReaders-th chunk.
  __device__ void run(int reader) const {
    const ChunkedSequence& of = ring.block().of;
    Turn turn;
    turn.skip(reader, Ring::kStages);
    int n = reader;
    if (n == 0 && of.chunks > 0 && of.begun > 0) {
      pass<true>(n, turn);
      n += Ring::kReaders, next(turn);
    }
#pragma unroll 1
    for (; n < of.chunks; n += Ring::kReaders, next(turn)) pass<false>(n, turn);
  }

 private:
  template <bool Resumed>
  __device__ void pass(int n, const Turn& turn) const {
    const int stage = opaque(turn.place);
    const Part part = chunk_part(p.shape, ring.block().of, n, ring.block().head);
    wait(ring.full() + stage, turn.parity);
    wait(ring.written() + stage, turn.parity);
    if constexpr (Ring::kApart) {
      // S and H have arrived here: the state warps' block may reuse its stage
      arrive_far(ring.empty() + stage, 0);
    } else if (scan.memories != nullptr) {
      ring.keep(scan, part.number, stage);
    }
    if constexpr (Resumed) bring_step(part);
    read_all<Resumed>(part, stage);
    if constexpr (Ring::kApart) arrive_far(ring.taken() + stage, 0);
    arrive_once(ring.empty() + stage);
  }

  __device__ static void next(Turn& turn) {
    if constexpr (Ring::kReaders == Ring::kStages) {
      turn.parity ^= 1;
    } else {
      turn.skip(Ring::kReaders, Ring::kStages);
    }
  }

  // Loads Delta^T, rounded, and computes |Delta_i|^2.
  __device__ void bring_step(const Part& part) const {
    const In<4>& from = p.start.step;
    const float* const place = static_cast<const float*>(from.data) +
                               offset_of(from, part.sequence(), static_cast<int64_t>(part.head));
    const auto step = ring.step();
#pragma unroll 1
    for (int m = lane(); m < S::M; m += 32) {
      float square = 0.f;
#pragma unroll 1
      for (int d = 0; d < S::D; ++d) {
        const bool exists = m < p.shape.M && d < p.shape.D;
        const T x = from_float<T>(exists ? place[d * from.stride[2] + m * from.stride[3]] : 0.f);
        step.at(m, d) = x;
        square = fmaf(to_float(x), to_float(x), square);
      }
      ring.step_square()[m] = square;
    }
    __syncwarp();
  }

  // Processes all query heads of the memory; the producer warp has loaded q of query head 0.
  template <bool Resumed>
  __device__ void read_all(const Part& part, int stage) const {
    const LatticeShape& shape = p.shape;
    const int group = shape.query_heads / shape.heads, first = part.head * group;
    const auto q = ring.tokens(stage, Ring::q);
    const int64_t batch = part.batch(), start = part.chunk.start;
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      if (member > 0) {
        __syncwarp();
        bring_by_warp(q, row_of<T>(p.q, batch, start, first + member), p.q.stride[1], part.chunk.length,
                      shape.M);
        commit_copies();
        wait_copies<0>();
        __syncwarp();
      }
      Sums<8> o;
      read<Resumed>(o, stage);
      Operand<4> rounded;
      round_to<T>(rounded, o);
      store_blocks(q, 0, 0, rounded);
      __syncwarp();
      // Recomputes the lane's row addresses; otherwise they occupy registers during the reads.
      store_rows<1>(q, row_of<T>(p.o, batch, start, first + member), p.o.stride[1], part.chunk.length,
                    shape.D, opaque(0));
    }
  }

  // Values of columns 8 n + lane_col() and the next.
  __device__ static float2 of_columns(const float* numbers, int n) {
    return *reinterpret_cast<const float2*>(numbers + 8 * n + lane_col());
  }

  // x y^T for 16 rows of x, from `first` on.
  __device__ static void product(Sums<2>& sums, const typename S::Memory& x, const typename S::Values& y,
                                 int first) {
    Sums<2> half;
    fill(sums, 0.f);
    fill(half, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4];
      load_block(a, x, first, 16 * i);
      add_product_transposed<T>(i % 2 ? half : sums, a, y, 0, 16 * i);
    }
    add(sums, half);
  }

  struct Inner {
    Triangles triangles;
    Sums<2> decays;
    uint32_t own[4];    // tril(G, -1) F
    float2 squares[2];  // |h|^2 of the lane's columns
  };
  __device__ static void make_inner(Inner& to, const ChunkTokens<16>& tokens, const typename S::Values& h) {
    make_triangles(to.triangles, to.decays, tokens);
    scale_columns(to.decays, [&](int n) { return of_columns(tokens.step, n); });
    Sums<2> g;
    product_of_rows(g, h, h);
    squares_of(to.squares, g);
    multiply(g, to.decays);
    apply(g, 0, 0, [&](float x, int t, int j) { return j < t ? x : 0.f; });
    bound<T>(g);
    pack<T>(to.own, g);
  }

  template <bool Resumed>
  __device__ void read(Sums<8>& o, int stage) const {
    const auto& tokens = ring.numbers(stage).tokens;
    const auto h = ring.tokens(stage, Ring::v);
    Inner inner;
    make_inner(inner, tokens, h);
    Sums<2> scores;
    fill(o, 0.f);
    fill(scores, 0.f);
#pragma unroll 1
    for (int first = 0; first < S::M; first += 16) add_vectors<Resumed>(o, scores, inner, stage, first);

    multiply(scores, inner.decays);
    scale_rows(scores, {kLift, kLift});
    bound<T>(scores);
    uint32_t a[4];
    pack<T>(a, scores);
    add_product<T>(o, a, h, 0);
  }

  // Adds the terms of 16 vectors to o and to the scores of the tokens.
  template <bool Resumed>
  __device__ void add_vectors(Sums<8>& o, Sums<2>& scores, const Inner& inner, int stage, int first) const {
    const auto& tokens = ring.numbers(stage).tokens;
    const auto memory = ring.memory(stage);
    const auto k = ring.tokens(stage, Ring::k), h = ring.tokens(stage, Ring::v);
    // a^T = S^T H^T, c^T, N^T
    Sums<2> a, w, N;
    product(a, memory, h, first);
    uint32_t c[4];
    load_block_transposed(c, k, first, 0);
    unpack<T>(w, c);
    if constexpr (kEncode) {
      each_sum<2>([&](int n, int i) { w.at[n][i] = a.at[n][i] - w.at[n][i]; });
      pack<T>(c, w);
      unpack<T>(w, c);
    }
    if constexpr (Resumed) {
      product(N, ring.step(), h, first);
      scale_columns(N, [&](int n) { return of_columns(tokens.open, n); });
    } else {
      fill(N, 0.f);
    }
    add_product_of_rows<T>(N, c, inner.own);

    // sigma, r, n
    scale_columns(w, [&](int n) { return of_columns(tokens.step, n); });
    Sums<2> sigma, x, r, n;
    make_lengths(sigma, r, n, w, a, N, inner.triangles, inner.squares);

    // q~^T and (q~ (m - sigma))^T
    Sums<2> query;
    uint32_t rounded[4];
    load_block_transposed(rounded, ring.tokens(stage, Ring::q), first, 0);
    unpack<T>(query, rounded);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 m = of_columns(tokens.kept, b);
      float2 open = {0.f, 0.f};
      if constexpr (Resumed) open = squared(of_columns(tokens.open, b));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float before = 0.f;
        if constexpr (Resumed) {
          before = (i & 1 ? open.y : open.x) * ring.step_square()[first + lane_row() + (i >> 1) * 8];
        }
        const float kept = i & 1 ? m.y : m.x, floor = least_share<T>() * (r.at[b][i] + before);
        query.at[b][i] *= inverse_root(fmaf(kept, kept, fmaxf(n.at[b][i] + before, floor)));
        x.at[b][i] = query.at[b][i] * (kept - sigma.at[b][i]);
      }
    }
    pack<T>(rounded, x);
    transpose_block(rounded);
    add_product<T>(o, rounded, memory, first);
    if constexpr (Resumed) {
      x = query;
      scale_columns(x, [&](int n) { return of_columns(tokens.open, n); });
      bound<T>(x);
      pack<T>(rounded, x);
      transpose_block(rounded);
      add_product<T>(o, rounded, ring.step(), first);
    }
    scale_rows(query, {1.f / kLift, 1.f / kLift});
    bound<T>(query);
    pack<T>(rounded, query);
    transpose_block(rounded);
    if constexpr (kEncode) {
      transpose_block(c);
    } else {
      load_block(c, k, 0, first);
    }
    add_product_of_rows<T>(scores, rounded, c);
  }
};

}  // namespace girih::kernels::lattice

// read.cuh by a single warp, which processes the chunk's 64 vectors 16 at a time, with the chunk's 16 tokens
// as columns (intra_chunk.cuh):
//
//     F_tj = e^{L_t - L_j} step_j          W_j = step_j c_j
//     N^T = c^T (tril(G, -1) F)^T + e^{L} Delta^T H^T          q~ = q y
//     O = sum over vectors of (q~ (m - sigma)) S^T + (q~ e^{L}) Delta^T, and (tril(q~ c^T) F) H
//
// Steps and decays stay in fp32; only c, G F and q~ are rounded.
#pragma once

#include "lattice/lengths.cuh"
#include "lattice/scan_short_ring.cuh"
#include "pipe/rsqrt.h"

namespace girih::kernels::lattice {

template <class Ring>
class ShortOutputWarp {
  using T = typename Ring::T;
  using S = typename Ring::S;
  static constexpr bool kEncode = Ring::kObjective == LatticeObjective::encode;
  static constexpr float kFp16Scale = fp16_scale<T>();

  const LatticeScan& scan;
  const LatticeRead& p;
  const Ring& ring;

 public:
  __device__ ShortOutputWarp(const ShortScanArguments& p, const Ring& ring)
      : scan(p.scan), p(p.read), ring(ring) {}

  // Processes every kOutputWarps-th chunk.
  __device__ void run(int output_warp) const {
    const ChunkedSequence& of = ring.block().of;
    PipelineState pipe;
    pipe.skip(output_warp, Ring::kStages);
    int n = output_warp;
    if (n == 0 && of.chunks > 0 && of.prior_tokens > 0) {
      pass<true>(n, pipe);
      n += Ring::kOutputWarps, next(pipe);
    }
#pragma unroll 1
    for (; n < of.chunks; n += Ring::kOutputWarps, next(pipe)) pass<false>(n, pipe);
  }

 private:
  template <bool Resumed>
  __device__ void pass(int n, const PipelineState& pipe) const {
    const int stage = opaque(pipe.stage);
    const ChunkCoord coord = chunk_coord(p.shape, ring.block().of, n, ring.block().head);
    ring.barriers().full.wait(pipe);
    ring.barriers().state_full.wait(pipe);
    if constexpr (Ring::kHasCluster) {
      // S and H have arrived here: the state warps' block may reuse its stage
      ring.barriers().empty.arrive_remote(stage, 0);
    } else if (scan.memories != nullptr) {
      ring.store_saved(scan, coord.number, stage);
    }
    if constexpr (Resumed) load_step(coord);
    read_all<Resumed>(coord, stage);
    if constexpr (Ring::kHasCluster) ring.barriers().state_empty.arrive_remote(stage, 0);
    ring.barriers().empty.arrive_warp(stage);
  }

  __device__ static void next(PipelineState& pipe) {
    if constexpr (Ring::kOutputWarps == Ring::kStages) {
      pipe.phase ^= 1;
    } else {
      pipe.skip(Ring::kOutputWarps, Ring::kStages);
    }
  }

  // Loads Delta^T, rounded, and computes |Delta_i|^2.
  __device__ void load_step(const ChunkCoord& coord) const {
    const InputTensor<4>& from = p.start.step;
    const float* const place = static_cast<const float*>(from.data) +
                               offset_of(from, coord.sequence(), static_cast<int64_t>(coord.head));
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
  __device__ void read_all(const ChunkCoord& coord, int stage) const {
    const LatticeShape& shape = p.shape;
    const int group = shape.query_heads / shape.heads, first = coord.head * group;
    const auto q = ring.tokens(stage, Ring::q);
    const int64_t batch = coord.batch(), start = coord.chunk.start;
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      if (member > 0) {
        __syncwarp();
        load_by_warp(q, row_of<T>(p.q, batch, start, first + member), p.q.stride[1], coord.chunk.length,
                     shape.M);
        commit_copies();
        wait_copies<0>();
        __syncwarp();
      }
      Accumulator<8> o;
      read<Resumed>(o, stage);
      AFragment<4> rounded;
      round_to_a_fragment<T>(rounded, o);
      store_blocks(q, 0, 0, rounded);
      __syncwarp();
      // Recomputes the lane's row addresses; otherwise they occupy registers during the reads.
      store_rows<1>(q, row_of<T>(p.o, batch, start, first + member), p.o.stride[1], coord.chunk.length,
                    shape.D, opaque(0));
    }
  }

  // Values of columns 8 n + lane_col() and the next.
  __device__ static float2 column_pair(const float* scalars, int n) {
    return *reinterpret_cast<const float2*>(scalars + 8 * n + lane_col());
  }

  // x y^T for 16 rows of x, from `first` on.
  __device__ static void product(Accumulator<2>& sums, const typename S::Memory& x,
                                 const typename S::Values& y, int first) {
    Accumulator<2> half;
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

  struct TokenTerms {
    Triangles triangles;
    Accumulator<2> decays;
    uint32_t own[4];    // tril(G, -1) F
    float2 squares[2];  // |h|^2 of the lane's columns
  };
  __device__ static void compute_token_terms(TokenTerms& to, const ChunkTokens<16>& tokens,
                                             const typename S::Values& h) {
    make_triangles(to.triangles, to.decays, tokens);
    scale_columns(to.decays, [&](int n) { return column_pair(tokens.step, n); });
    Accumulator<2> g;
    product_of_rows(g, h, h);
    load_diagonal(to.squares, g);
    multiply(g, to.decays);
    map_elements(g, 0, 0, [&](float x, int t, int j) { return j < t ? x : 0.f; });
    clamp_factor<T>(g);
    pack<T>(to.own, g);
  }

  template <bool Resumed>
  __device__ void read(Accumulator<8>& o, int stage) const {
    const auto& tokens = ring.scalars(stage).tokens;
    const auto h = ring.tokens(stage, Ring::v);
    TokenTerms token_terms;
    compute_token_terms(token_terms, tokens, h);
    Accumulator<2> scores;
    fill(o, 0.f);
    fill(scores, 0.f);
#pragma unroll 1
    for (int first = 0; first < S::M; first += 16) add_vectors<Resumed>(o, scores, token_terms, stage, first);

    multiply(scores, token_terms.decays);
    scale_rows(scores, {kFp16Scale, kFp16Scale});
    clamp_factor<T>(scores);
    uint32_t a[4];
    pack<T>(a, scores);
    add_product<T>(o, a, h, 0);
  }

  // Adds the terms of 16 vectors to o and to the scores of the tokens.
  template <bool Resumed>
  __device__ void add_vectors(Accumulator<8>& o, Accumulator<2>& scores, const TokenTerms& token_terms,
                              int stage, int first) const {
    const auto& tokens = ring.scalars(stage).tokens;
    const auto memory = ring.memory(stage);
    const auto k = ring.tokens(stage, Ring::k), h = ring.tokens(stage, Ring::v);
    // a^T = S^T H^T, c^T, N^T
    Accumulator<2> a, w, N;
    product(a, memory, h, first);
    uint32_t c[4];
    load_block_transposed(c, k, first, 0);
    unpack<T>(w, c);
    if constexpr (kEncode) {
      for_each_register<2>([&](int n, int i) { w.at[n][i] = a.at[n][i] - w.at[n][i]; });
      pack<T>(c, w);
      unpack<T>(w, c);
    }
    if constexpr (Resumed) {
      product(N, ring.step(), h, first);
      scale_columns(N, [&](int n) { return column_pair(tokens.call_decay, n); });
    } else {
      fill(N, 0.f);
    }
    add_product_of_rows<T>(N, c, token_terms.own);

    // sigma, r, n
    scale_columns(w, [&](int n) { return column_pair(tokens.step, n); });
    Accumulator<2> sigma, x, r, n;
    compute_lengths(sigma, r, n, w, a, N, token_terms.triangles, token_terms.squares);

    // q~^T and (q~ (m - sigma))^T
    Accumulator<2> query;
    uint32_t rounded[4];
    load_block_transposed(rounded, ring.tokens(stage, Ring::q), first, 0);
    unpack<T>(query, rounded);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 m = column_pair(tokens.memory_decay, b);
      float2 call_decay = {0.f, 0.f};
      if constexpr (Resumed) call_decay = squared(column_pair(tokens.call_decay, b));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float before = 0.f;
        if constexpr (Resumed) {
          before =
              (i & 1 ? call_decay.y : call_decay.x) * ring.step_square()[first + lane_row() + (i >> 1) * 8];
        }
        const float memory_decay = i & 1 ? m.y : m.x, floor = floor_factor<T>() * (r.at[b][i] + before);
        query.at[b][i] *= rsqrt_fast(fmaf(memory_decay, memory_decay, fmaxf(n.at[b][i] + before, floor)));
        x.at[b][i] = query.at[b][i] * (memory_decay - sigma.at[b][i]);
      }
    }
    pack<T>(rounded, x);
    transpose_block(rounded);
    add_product<T>(o, rounded, memory, first);
    if constexpr (Resumed) {
      x = query;
      scale_columns(x, [&](int n) { return column_pair(tokens.call_decay, n); });
      clamp_factor<T>(x);
      pack<T>(rounded, x);
      transpose_block(rounded);
      add_product<T>(o, rounded, ring.step(), first);
    }
    scale_rows(query, {1.f / kFp16Scale, 1.f / kFp16Scale});
    clamp_factor<T>(query);
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

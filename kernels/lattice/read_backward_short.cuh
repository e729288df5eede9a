// read_backward.cuh by a single warp, for chunks of at most 16 tokens and memories of at most 64 x 64, with
// HQ = H and no resumed chunks. The warp processes a chunk's 64 vectors 16 at a time, with the chunk's 16
// tokens as columns. Products stay in registers as factors of the next products. As in read_short.cuh, with
//
//     F_tj = E_tj step_j          W_j = step_j c_j          P = tril(q~ c^T) F          R = tril(eta c^T) F
//
// Sums over vectors (P, R and values of tokens) stay in registers. The factors of dk and dS that wait for dH
// are stored in shared memory (read_backward_memory_short.cuh).
#pragma once

#include "lattice/lengths.cuh"
#include "lattice/read_backward.cuh"
#include "pipe/rsqrt.h"

namespace girih::kernels::lattice {

template <typename T>
struct ShortReadBackward {
  using S = Sizes<T, 16, 64, 64, true>;
  static constexpr int kThreads = 32;
  // 16 x 16 blocks as A fragments, one for every 16 vectors: 16 bytes for each lane.
  using Blocks = uint4*;
  static constexpr int kBlocks = S::M / 16, kOfBlocks = kBlocks * 32;
  static constexpr int kBytes = S::Memory::kBytes + 4 * S::Keys::kBytes +
                                3 * kOfBlocks * static_cast<int>(sizeof(uint4)) +
                                static_cast<int>(sizeof(ChunkTokens<16>));

  using VectorRows = Accumulator<2>;  // [16 vectors, tokens]
  using Block = uint32_t[4];          // the same, rounded: an A fragment
  static constexpr float kFp16Scale = fp16_scale<T>();

  const LatticeReadBackward& p;
  const ChunkCoord& coord;
  typename S::Memory memory;       // S^T, then dS^T
  typename S::Keys k, h, q, dout;  // K, then dk; V, then H; Q, then dq, then dv
  Blocks along, da, dW;            // q~ (m - sigma), da, step dW
  ChunkTokens<16>* tokens;

  // Values of the chunk's tokens, by column or as factors.
  struct TokenTerms {
    Triangles forward, backward;
    Accumulator<2> decays;                         // E, [t, j], zero for j > t
    Block own, own_back;                           // tril(G, -1) F; (tril(G, -1) E)^T
    Block scores, scores_back;                     // tril(dO H^T) F; (tril(dO H^T) E)^T
    float2 squares[2], steps[2], memory_decay[2];  // |h|^2, step, m of the lane's columns
  };
  // Sums over all vectors.
  struct VectorSums {
    Accumulator<2> reads, pairs;  // q~ c^T, eta c^T
    float2 gammas[2], floors[2];  // of the lane's columns and rows
  };

  __device__ ShortReadBackward(const LatticeReadBackward& p, const ChunkCoord& coord, unsigned char* shared)
      : p(p), coord(coord) {
    SharedAllocator layout(shared);
    layout(memory)(k)(h)(q)(dout)(along, kOfBlocks)(da, kOfBlocks)(dW, kOfBlocks)(tokens, 1);
  }

  // Computes the sums over vectors, and stores q~ (m - sigma), da, dW and dq in shared memory.
  __device__ void run(VectorSums& sums, TokenTerms& token_terms) const {
    load_inputs();
    compute_token_terms(token_terms);
    fill(sums.reads, 0.f);
    fill(sums.pairs, 0.f);
#pragma unroll
    for (int n = 0; n < 2; ++n) sums.gammas[n] = sums.floors[n] = {0.f, 0.f};
#pragma unroll 1
    for (int first = 0; first < S::M; first += 16) add_vectors(sums, token_terms, first);
    store_token_sums(sums);
  }

  __device__ bool is(LatticeObjective objective) const { return p.shape.objective == objective; }

  // Offset of the chunk's memory. A memory that fills its tile is one copy, with offsets known at compile
  // time.
  __device__ int64_t memory_offset_of_chunk() const {
    return (coord.number * p.shape.heads + coord.head) * static_cast<int64_t>(p.shape.M * p.shape.D);
  }
  __device__ bool is_whole() const { return p.shape.D == S::D && p.shape.M == S::M; }
  template <class In>
  __device__ void load_inputs(const typename S::Keys& to, const In& from, int cols) const {
    load_by_warp(to, row_of<T>(from, coord.batch(), coord.chunk.start, coord.head), from.stride[1],
                 coord.chunk.length, cols);
  }
  __device__ void load_inputs() const {
    const LatticeShape& shape = p.shape;
    const T* const from = static_cast<const T*>(p.memories) + memory_offset_of_chunk();
    load_inputs(k, p.k, shape.M);
    load_inputs(h, p.v, shape.D);
    if (is_whole()) {
      load_async<32>(memory, from, S::D, S::M, S::D, lane());
    } else {
      load_by_warp(memory, from, shape.D, shape.M, shape.D);
    }
    commit_copies();
    load_inputs(q, p.q, shape.M);
    load_inputs(dout, p.dout, shape.D);
    commit_copies();
    store_tokens<T>(*tokens, p, p.start, coord);
    wait_copies<1>();
    __syncwarp();
    if (is(LatticeObjective::decode)) make_h();
    wait_copies<0>();
    __syncwarp();
  }
  // H = K S^T - V, which replaces V.
  __device__ void make_h() const {
    Accumulator<8> sums;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t v[4];
      load_block(v, h, 0, 16 * i);
      unpack<T>(reinterpret_cast<Accumulator<2>&>(sums.at[2 * i]), v);
    }
    scale_rows(sums, {-1.f, -1.f});
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t x[4];
      load_block(x, k, 0, 16 * i);
      add_product<T>(sums, x, memory, 16 * i);
    }
    AFragment<4> rounded;
    round_to_a_fragment<T>(rounded, sums);
    __syncwarp();
    store_blocks(h, 0, 0, rounded);
  }

  __device__ static float2 column_pair(const float* numbers, int n) {
    return *reinterpret_cast<const float2*>(numbers + 8 * n + lane_col());
  }

  __device__ void compute_token_terms(TokenTerms& to) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      to.steps[n] = column_pair(tokens->step, n), to.memory_decay[n] = column_pair(tokens->memory_decay, n);
    }
    make_triangles(to.forward, to.decays, *tokens);
    transpose_triangle(to.backward, to.forward);
    // H H^T, dO H^T
    Accumulator<2> g, scores;
    fill(g, 0.f);
    fill(scores, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t x[4], y[4];
      load_block(x, h, 0, 16 * i);
      load_block(y, dout, 0, 16 * i);
      add_product_of_rows<T>(g, x, x);
      add_product_of_rows<T>(scores, y, x);
    }
    load_diagonal(to.squares, g);
    map_elements(g, 0, 0, [&](float x, int t, int j) { return j < t ? x : 0.f; });
    compute_factors(to.own, to.own_back, g, to);
    compute_factors(to.scores, to.scores_back, scores, to);
  }
  // x F, and (x E)^T.
  __device__ static void compute_factors(Block& with_steps, Block& back, Accumulator<2>& x,
                                         const TokenTerms& token_terms) {
    multiply(x, token_terms.decays);
    Accumulator<2> y = x;
    scale_columns(y, [&](int n) { return token_terms.steps[n]; });
    clamp_factor<T>(x);
    clamp_factor<T>(y);
    pack<T>(with_steps, y);
    pack<T>(back, x);
    transpose_block(back);
  }

  __device__ static float of(const float2 (&numbers)[2], int n, int i) {
    return i & 1 ? numbers[n].y : numbers[n].x;
  }
  // Rounds x / fp16_scale() to an A fragment.
  __device__ static void round_scaled(Block& to, VectorRows x) {
    scale_rows(x, {1.f / kFp16Scale, 1.f / kFp16Scale});
    clamp_factor<T>(x);
    pack<T>(to, x);
  }
  __device__ static void store_fragment(Blocks to, int first, const Block& x) {
    to[2 * first + lane()] = {x[0], x[1], x[2], x[3]};
  }
  __device__ static void load_fragment(Block& x, Blocks from, int first) {
    const uint4 y = from[2 * first + lane()];
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }

  // Adds the terms of 16 vectors that do not need dH: to `all` the sums over vectors, and to shared memory q~
  // (m - sigma), da, step dW and dq.
  __device__ void add_vectors(VectorSums& all, const TokenTerms& token_terms, int first) const {
    const bool encode = is(LatticeObjective::encode);
    // a^T = S^T H^T, (dB)^T = S^T dO^T
    VectorRows a, dB;
    fill(a, 0.f);
    fill(dB, 0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Block s;
      load_block(s, memory, first, 16 * i);
      add_product_transposed<T>(a, s, h, 0, 16 * i);
      add_product_transposed<T>(dB, s, dout, 0, 16 * i);
    }
    // c^T, W^T, N^T; and c
    Block c, keys;
    VectorRows key, W, N;
    load_block_transposed(c, k, first, 0);
    unpack<T>(key, c);
    if (encode) {
      for_each_register<2>([&](int n, int i) { key.at[n][i] = a.at[n][i] - key.at[n][i]; });
      pack<T>(c, key);
      unpack<T>(key, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) keys[i] = c[i];
      transpose_block(keys);
    } else {
      load_block(keys, k, 0, first);
    }
    fill(N, 0.f);
    add_product_of_rows<T>(N, c, token_terms.own);
    W = key;
    scale_columns(W, [&](int n) { return token_terms.steps[n]; });

    // sigma, n, y; half: -y^2 / 2, or 0 where n is at its floor
    VectorRows sigma, x, r, lengths, y, half;
    compute_lengths(sigma, r, lengths, W, a, N, token_terms.forward, token_terms.squares);
    for_each_register<2>([&](int n, int i) {
      const float m = of(token_terms.memory_decay, n, i), floor = floor_factor<T>() * r.at[n][i];
      const float inverse = rsqrt_fast(fmaf(m, m, fmaxf(lengths.at[n][i], floor)));
      y.at[n][i] = inverse;
      half.at[n][i] = lengths.at[n][i] < floor ? 0.f : -0.5f * inverse * inverse;
    });

    // q~ and q~ (m - sigma)
    VectorRows query;
    Block queries, rounded;
    load_block_transposed(queries, q, first, 0);
    unpack<T>(query, queries);
    multiply(query, y);
    for_each_register<2>(
        [&](int n, int i) { sigma.at[n][i] = of(token_terms.memory_decay, n, i) - sigma.at[n][i]; });
    x = query;
    multiply(x, sigma);
    pack<T>(rounded, x);
    store_fragment(along, first, rounded);
    round_scaled(queries, query);
    VectorRows of_w;  // dW
    fill(of_w, 0.f);
    add_product_of_rows<T>(of_w, queries, token_terms.scores_back);
    transpose_block(queries);
    add_product_of_rows<T>(all.reads, queries, keys);

    // dq~ = dB (m - sigma) + dA W, dq; nu, zeta
    fill(x, 0.f);
    add_product_of_rows<T>(x, c, token_terms.scores);
    VectorRows nu, zeta;
    for_each_register<2>([&](int n, int i) {
      zeta.at[n][i] = -dB.at[n][i] * query.at[n][i];
      const float d = fmaf(dB.at[n][i], sigma.at[n][i], x.at[n][i]), kappa = d * query.at[n][i];
      nu.at[n][i] = half.at[n][i] * kappa;
      x.at[n][i] = d * y.at[n][i];
      query.at[n][i] = kappa;
    });
    pack<T>(rounded, x);
    store_block_transposed(q, first, 0, rounded);
    if (p.ddecay_at_floor.data != nullptr) {
      for_each_register<2>([&](int n, int i) {
        const float my = of(token_terms.memory_decay, n, i) * y.at[n][i];
        const float share = half.at[n][i] < 0.f ? 0.f : query.at[n][i] * fmaxf(fmaf(-my, my, 1.f), 0.f);
        (i & 1 ? all.floors[n].y : all.floors[n].x) += share;
      });
    }

    // z, eta, omega
    VectorRows z, eta, omega;
    fill(z, 0.f);
    fill(omega, 0.f);
    add_triangle_product(z, nu, token_terms.backward.square);
    for_each_register<2>([&](int n, int i) {
      z.at[n][i] *= 2.f;
      eta.at[n][i] = z.at[n][i] * W.at[n][i];
      zeta.at[n][i] = fmaf(-eta.at[n][i], a.at[n][i], zeta.at[n][i]);
    });
    round_scaled(rounded, eta);
    add_product_of_rows<T>(of_w, rounded, token_terms.own_back);
    transpose_block(rounded);
    add_product_of_rows<T>(all.pairs, rounded, keys);
    add_triangle_product(omega, zeta, token_terms.backward.decay);

    // dW and da; sigma is m - sigma here
    for_each_register<2>([&](int n, int i) {
      const float w = W.at[n][i], of_a = a.at[n][i], o = omega.at[n][i];
      const float sums = of(token_terms.memory_decay, n, i) - sigma.at[n][i], Wa = w * of_a;
      float d = fmaf(of_a, o, kFp16Scale * of_w.at[n][i]);
      d = fmaf(z.at[n][i], fmaf(w, of(token_terms.squares, n, i), fmaf(of_a, Wa - sums, N.at[n][i])), d);
      float to_a = fmaf(w, o, eta.at[n][i] * (Wa - sums));
      (i & 1 ? all.gammas[n].y : all.gammas[n].x) += key.at[n][i] * d;
      d *= of(token_terms.steps, n, i);
      if (encode) to_a += d, d = -d;
      x.at[n][i] = d, omega.at[n][i] = to_a;
    });
    pack<T>(rounded, x);
    store_fragment(dW, first, rounded);
    clamp_factor<T>(omega);
    pack<T>(rounded, omega);
    store_fragment(da, first, rounded);
  }

  // Stores sums over vectors: dgamma, and the gradient of a row's decay where n is at its floor.
  __device__ void store_token_sums(const VectorSums& all) const {
    store_token_sum(p.dgamma, all.gammas, sign_of(p.shape.objective));
    if (p.ddecay_at_floor.data != nullptr) store_token_sum(p.ddecay_at_floor, all.floors, 1.f);
  }
  __device__ void store_token_sum(const OutputTensor<3>& to, const float2 (&numbers)[2], float by) const {
    // The four lanes that share columns end with one sum each.
    const bool upper = lane() & 16, odd = lane() & 8;
    float x = upper ? numbers[1].x : numbers[0].x, y = upper ? numbers[1].y : numbers[0].y;
    x += __shfl_xor_sync(~0u, upper ? numbers[0].x : numbers[1].x, 16);
    y += __shfl_xor_sync(~0u, upper ? numbers[0].y : numbers[1].y, 16);
    float sum = (odd ? y : x) + __shfl_xor_sync(~0u, odd ? x : y, 8);
    sum += __shfl_xor_sync(~0u, sum, 4);
    const int t = (upper ? 8 : 0) + lane_col() + (odd ? 1 : 0);
    if ((lane() & 4) != 0 || t >= coord.chunk.length) return;
    store_element(to, by * sum, coord.batch(), coord.chunk.start + t, static_cast<int64_t>(coord.head));
  }
};

}  // namespace girih::kernels::lattice

// Quantities of a chunk that depend only on its tokens and on S at its start, by a block of M / 16 warps:
//
//     E, H, W from S, W = sign gamma c          a = H S          G = H H^T          E_tj = e^{L_t - L_j}
//     sigma = tril(E) (W a)                     N = (tril(G, -1) E) W + e^{L} H Delta
//     r = tril(E E) [W^2 G_jj] + e^{2L} |Delta|^2
//     n = tril(E E) [W^2 G_jj + 2 W (N - a (sigma - W a)) - (W a)^2] + e^{2L} |Delta|^2,
//         at least (kappa eps)^2 r
//     y = (m^2 + n)^{-1/2}                      m = e^{max(L, -30)}
//
// Each warp has 16 of the s_i. Matrices with a column for each s_i are transposed: a^T, W^T and N^T have the
// warp's 16 s_i as rows, and 16 tokens at a time as columns. So running sums over tokens stay in a warp. H
// [tokens, D] is distributed in blocks of 16 rows and kWide columns.
#pragma once

#include <type_traits>

#include "lattice/tile_io.cuh"
#include "lattice/tokens.cuh"

namespace girih::kernels::lattice {

// (kappa eps)^2 with kappa = 4 and the eps of T.
template <typename T>
__device__ constexpr float floor_factor() {
  return std::is_same_v<T, __half> ? 0x1p-18f : 0x1p-12f;
}

// Plain: HQ = H, and no chunk is resumed (is_plain_call()). The general case needs more registers even if it
// does not occur.
template <typename T_, int R_, int D_, int M_, bool Plain = false>
struct Sizes {
  using T = T_;
  static constexpr int R = R_, D = D_, M = M_;  // tokens of a tile, and widths
  static constexpr bool kPlain = Plain;
  static constexpr int kBlocks = R / 16, kWarps = M / 16, kThreads = 2 * M;
  static constexpr int kWide = D * kBlocks / kWarps < 16 ? 16 : D * kBlocks / kWarps;
  using Memory = SharedTile<T, M, D>;
  using Keys = SharedTile<T, R, M>;
  using Values = SharedTile<T, R, D>;
  using Scores = SharedTile<T, R, (R < 32 ? 32 : R)>;
};

// Own: there is one block of 16 tokens, and each warp computes all of tril(G, -1) E in registers, without a
// barrier.
template <class Sizes_, bool Own = false>
struct IntraChunk {
  using S = Sizes_;
  using T = typename S::T;
  static constexpr int kBlocks = S::kBlocks;
  static constexpr float kFp16Scale = fp16_scale<T>();
  static constexpr int kBytes = S::Memory::kBytes + 2 * S::Keys::kBytes + S::Values::kBytes +
                                S::Scores::kBytes + static_cast<int>(sizeof(ChunkTokens<S::R>)) + 4 * S::M;
  static constexpr int kResumedBytes = S::Memory::kBytes;  // added if chunks may be resumed

  typename S::Memory memory;   // S^T
  typename S::Keys k, w;       // K; W scaled by fp16_scale()
  typename S::Values h;        // V, then H
  typename S::Scores decayed;  // tril(G, -1) E
  ChunkTokens<S::R>* tokens;
  float* step_square;       // |Delta_i|^2
  typename S::Memory step;  // Delta^T
  int warp;
  bool resumed;
  LatticeObjective objective;
  uint32_t own[4];    // tril(G, -1) E
  float2 squares[2];  // |h|^2 of the lane's columns
  static_assert(!Own || kBlocks == 1);

  __device__ void set_layout(SharedAllocator& layout) {
    layout(memory)(k)(w)(h)(decayed)(tokens, 1)(step_square, S::M);
  }

  // Starts the copies of S, K and V; called by all threads.
  template <class Problem>
  __device__ void load_inputs(const Problem& p, const ChunkCoord& coord) {
    const LatticeShape& shape = p.shape;
    warp = warp_index();
    resumed = !S::kPlain && coord.resumed;
    objective = shape.objective;
    const int64_t place = (coord.number * shape.heads + coord.head) * shape.M * shape.D;
    const int64_t start = coord.chunk.start, head = coord.head;
    load_by_block<S::kThreads>(memory, static_cast<const T*>(p.memories) + place, shape.D, shape.M, shape.D);
    load_by_block<S::kThreads>(k, row_of<T>(p.k, coord.batch(), start, head), p.k.stride[1],
                               coord.chunk.length, shape.M);
    load_by_block<S::kThreads>(h, row_of<T>(p.v, coord.batch(), start, head), p.v.stride[1],
                               coord.chunk.length, shape.D);
  }
  // Loads Delta, rounded; called by all threads.
  __device__ void load_step(const InputTensor<4>& from, const LatticeShape& shape,
                            const ChunkCoord& coord) const {
    const float* first = static_cast<const float*>(from.data) + offset_of(from, coord.sequence(), coord.head);
#pragma unroll 1
    for (int i = threadIdx.x; i < S::M * S::D; i += S::kThreads) {
      const int m = i % S::M, d = i / S::M;
      const bool exists = m < shape.M && d < shape.D;
      step.at(m, d) = from_float<T>(exists ? first[d * from.stride[2] + m * from.stride[3]] : 0.f);
    }
  }

  // The warp's block of products [tokens, D].
  __device__ int block_row() const { return warp % kBlocks * 16; }
  __device__ int block_col() const { return warp / kBlocks * S::kWide; }
  __device__ bool has_block() const { return block_col() < S::D; }
  __device__ int first_vector() const { return 16 * warp; }  // index of the warp's vector 0

  // decode: H = K S^T - V, which replaces V. load_h_operands() does not need S; finish_h() does.
  struct HBlock {
    Accumulator<S::kWide / 8> h;
    AFragment<S::M / 16> k;
  };
  __device__ void load_h_operands(HBlock& h_block) const {
    if (!has_block()) return;
    const int row = block_row(), col = block_col();
    load_blocks(h_block.k, k, row);
    for_each_register_pair<S::kWide / 8>([&](int n, int i) {
      const float2 v =
          unpack_pair<T>(*reinterpret_cast<const uint32_t*>(&lane_element(h, row + 8 * i, col + 8 * n)));
      h_block.h.at[n][2 * i] = -v.x, h_block.h.at[n][2 * i + 1] = -v.y;
    });
  }
  __device__ void finish_h(HBlock& h_block) const {
    if (!has_block()) return;
    const int row = block_row(), col = block_col();
    // Two accumulators halve the chain of dependent products; wide blocks have enough independent ones.
    constexpr bool kHalves = S::kWide == 16;
    Accumulator<kHalves ? 2 : 1> half;
    fill(half, 0.f);
#pragma unroll
    for (int i = 0; i < S::M / 16; ++i) {
      if constexpr (kHalves) {
        add_product<T>(i % 2 ? half : h_block.h, h_block.k.at[i], memory, 16 * i, col);
      } else {
        add_product<T>(h_block.h, h_block.k.at[i], memory, 16 * i, col);
      }
    }
#pragma unroll
    for (int n = 0; kHalves && n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) h_block.h.at[n][i] += half.at[n % (kHalves ? 2 : 1)][i];
    }
    AFragment<S::kWide / 16> rounded;
    round_to_a_fragment<T>(rounded, h_block.h);
    __syncwarp();
    store_blocks(h, row, col, rounded);
  }
  __device__ void make_h() const {
    if (objective != LatticeObjective::decode) return;
    HBlock h_block;
    load_h_operands(h_block);
    finish_h(h_block);
  }

  // a^T = S^T H^T
  __device__ void make_a(Accumulator<2>& a, int first) const {
    fill(a, 0.f);
#pragma unroll 4
    for (int d = 0; d < S::D; d += 16) {
      uint32_t s[4];
      load_block(s, memory, first_vector(), d);
      add_product_transposed<T>(a, s, h, first, d);
    }
  }

  // W^T of tokens first..first+15: c = k or a - k times the token's weight, for the warp's s_i, as an A
  // fragment.
  __device__ void compute_w_block(uint32_t (&to)[4], int first, const float* weights) const {
    if (objective != LatticeObjective::encode) {
      load_scaled_transposed<T>(to, k, first_vector(), first, weights + first);
      return;
    }
    Accumulator<2> a, key;
    make_a(a, first);
    load_block_transposed(to, k, first_vector(), first);
    unpack<T>(key, to);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 by = *reinterpret_cast<const float2*>(weights + first + 8 * n + lane_col());
#pragma unroll
      for (int i = 0; i < 4; ++i) a.at[n][i] = (i & 1 ? by.y : by.x) * (a.at[n][i] - key.at[n][i]);
    }
    pack<T>(to, a);
  }
  __device__ void make_w() const {
#pragma unroll 1
    for (int first = 0; first < S::R; first += 16) {
      uint32_t x[4];
      compute_w_block(x, first, tokens->scaled_step);
      store_block_transposed(w, first_vector(), first, x);
    }
    __syncwarp();
  }

  // tril(G, -1) E, and the diagonal of G.
  __device__ void compute_gram() {
    if constexpr (Own) {
      Accumulator<2> g;
      product_of_rows(g, h, h);
      load_diagonal(squares, g);
      map_elements(g, 0, 0, [&](float x, int t, int j) { return j < t ? x * tokens->decay(t, j) : 0.f; });
      clamp_factor<T>(g);
      pack<T>(own, g);
      return;
    }
    compute_score_blocks<T, S::kWarps>(decayed, h, h, warp, 0, [&](float g, int t, int j) {
      if (t == j) tokens->square[t] = g;
      return j < t ? g * tokens->decay(t, j) : 0.f;
    });
  }

  // |Delta_i|^2 of the warp's s_i.
  __device__ void make_step_squares() const {
    if (!resumed) return;
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      float sum = 0.f;
      for (int d = lane(); d < S::D; d += 32) {
        const float x = to_float(step.at(first_vector() + row, d));
        sum = fmaf(x, x, sum);
      }
      sum = sum_over_col(sum_over_row(sum));
      if (lane() == 0) step_square[first_vector() + row] = sum;
    }
    __syncwarp();
  }

  // a^T, W^T and N^T of tokens first..first+15.
  struct TokenBlock {
    Accumulator<2> a, w, N;
  };
  __device__ void compute_token_block(TokenBlock& to, int first) const {
    make_a(to.a, first);
    fill(to.N, 0.f);
    if (resumed) {
#pragma unroll 1
      for (int d = 0; d < S::D; d += 16) {
        uint32_t x[4];
        load_block(x, step, first_vector(), d);
        add_product_transposed<T>(to.N, x, h, first, d);
      }
      scale_columns(to.N, [&](int n) {
        const float2 by = call_decay(first, n);
        return float2{kFp16Scale * by.x, kFp16Scale * by.y};
      });
    }
    uint32_t x[4];
    if constexpr (Own) {
      load_block_transposed(x, w, first_vector(), 0);
      mma<T>(to.N.at[0], x, own[0], own[2]);
      mma<T>(to.N.at[1], x, own[1], own[3]);
    } else {
#pragma unroll 1
      for (int j = 0; j <= first; j += 16) {
        load_block_transposed(x, w, first_vector(), j);
        add_product_transposed<T>(to.N, x, decayed, first, j);
      }
    }
    unpack<T>(to.w, x);
    scale_rows(to.N, {1.f / kFp16Scale, 1.f / kFp16Scale});
    scale_rows(to.w, {1.f / kFp16Scale, 1.f / kFp16Scale});
  }
  __device__ float2 call_decay(int first, int n) const {
    return *reinterpret_cast<const float2*>(&tokens->call_decay[first + 8 * n + lane_col()]);
  }

  struct Carries {
    Carry sigma, r, n;
  };
  // sigma^T and y^T of tokens first..first+15; calls go in the order of tokens. y is negative where n is at
  // its floor.
  __device__ void compute_lengths_of_reads(Accumulator<2>& sigma, Accumulator<2>& y, const TokenBlock& of,
                                           Carries& carries, int first) const {
    Triangles triangles;
    make_triangles<Direction::forward>(triangles, *tokens, first);
    const auto decay = [&](int col) { return block_decay<Direction::forward>(*tokens, first, col); };
    const auto square = [&](int col) { return squared(decay(col)); };
    sigma = of.w;
    multiply(sigma, of.a);
    compute_running_sums<Direction::forward>(sigma, triangles.decay, carries.sigma, decay);
    Accumulator<2> r, n;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 h2 =
          Own ? squares[b] : *reinterpret_cast<const float2*>(&tokens->square[first + 8 * b + lane_col()]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = of.a.at[b][i], W = of.w.at[b][i], Wa = W * a;
        const float own = W * W * (i & 1 ? h2.y : h2.x);
        r.at[b][i] = own;
        n.at[b][i] = own - Wa * Wa + 2.f * W * (of.N.at[b][i] - a * (sigma.at[b][i] - Wa));
      }
    }
    compute_running_sums<Direction::forward>(r, triangles.square, carries.r, square);
    compute_running_sums<Direction::forward>(n, triangles.square, carries.n, square);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 m = *reinterpret_cast<const float2*>(&tokens->memory_decay[first + 8 * b + lane_col()]);
      float2 p = {0.f, 0.f};
      if (resumed) p = squared(call_decay(first, b));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float before = 0.f;
        if (resumed) before = (i & 1 ? p.y : p.x) * step_square[first_vector() + lane_row() + (i >> 1) * 8];
        const float memory_decay = i & 1 ? m.y : m.x, floor = floor_factor<T>() * (r.at[b][i] + before);
        const float length = n.at[b][i] + before,
                    inverse = rsqrtf(fmaf(memory_decay, memory_decay, fmaxf(length, floor)));
        y.at[b][i] = length < floor ? -inverse : inverse;
      }
    }
  }
};

// Replaces q by q~ = q y, scaled by 1 / fp16_scale(), and computes q~ (m - sigma), for tokens first..first+15
// and the warp's s_i.
template <class W, class Keys>
__device__ inline void scale_queries(const W& intra_chunk, const Keys& q, const Keys& along,
                                     const Accumulator<2>& y, const Accumulator<2>& sigma, int first) {
  using T = typename W::T;
  uint32_t x[4];
  load_block_transposed(x, q, intra_chunk.first_vector(), first);
  Accumulator<2> query, scaled;
  unpack<T>(query, x);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 m =
        *reinterpret_cast<const float2*>(&intra_chunk.tokens->memory_decay[first + 8 * n + lane_col()]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      query.at[n][i] *= fabsf(y.at[n][i]);
      scaled.at[n][i] = query.at[n][i] * ((i & 1 ? m.y : m.x) - sigma.at[n][i]);
    }
  }
  scale_rows(query, {1.f / fp16_scale<T>(), 1.f / fp16_scale<T>()});
  clamp_factor<T>(query);
  pack<T>(x, query);
  __syncwarp();
  store_block_transposed(q, intra_chunk.first_vector(), first, x);
  pack<T>(x, scaled);
  store_block_transposed(along, intra_chunk.first_vector(), first, x);
}

// tril(x y^T) E, by the block's warps from warp `first` on.
template <class S, class X, class Y>
__device__ inline void compute_decayed_scores(const IntraChunk<S>& intra_chunk, const typename S::Scores& to,
                                              const X& x, const Y& y, int first) {
  compute_score_blocks<typename S::T, S::kWarps>(
      to, x, y, intra_chunk.warp, first,
      [&](float s, int t, int j) { return j <= t ? s * intra_chunk.tokens->decay(t, j) : 0.f; });
}

// The same for one block of tokens, as an A fragment; each warp computes all of it.
template <class S, bool Own, class X, class Y>
__device__ inline void compute_own_scores(uint32_t (&to)[4], const IntraChunk<S, Own>& intra_chunk,
                                          const X& x, const Y& y) {
  using T = typename S::T;
  Accumulator<2> s;
  product_of_rows(s, x, y);
  map_elements(s, 0, 0,
               [&](float a, int t, int j) { return j <= t ? a * intra_chunk.tokens->decay(t, j) : 0.f; });
  clamp_factor<T>(s);
  pack<T>(to, s);
}

}  // namespace girih::kernels::lattice

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

#include "lattice/rows.cuh"
#include "lattice/tokens.cuh"

namespace girih::kernels::lattice {

// (kappa eps)^2 with kappa = 4 and the eps of T.
template <typename T>
__device__ constexpr float least_share() {
  return std::is_same_v<T, __half> ? 0x1p-18f : 0x1p-12f;
}

// Plain: HQ = H, and no chunk is resumed. The general case needs more registers even if it does not occur.
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

// Own, for one block of tokens: each warp computes tril(G, -1) E for itself, in registers, without a barrier.
template <class Sizes_, bool Own = false>
struct Within {
  using S = Sizes_;
  using T = typename S::T;
  static constexpr int kBlocks = S::kBlocks;
  static constexpr float kLift = lift<T>();
  static constexpr int kBytes = S::Memory::kBytes + 2 * S::Keys::kBytes + S::Values::kBytes +
                                S::Scores::kBytes + static_cast<int>(sizeof(ChunkTokens<S::R>)) + 4 * S::M;
  static constexpr int kResumedBytes = S::Memory::kBytes;  // added if chunks may be resumed

  typename S::Memory memory;   // S^T
  typename S::Keys k, w;       // K; W scaled by lift()
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

  __device__ void lay_out(Layout& layout) { layout(memory)(k)(w)(h)(decayed)(tokens, 1)(step_square, S::M); }

  // Starts the copies of S, K and V; called by all threads.
  template <class Problem>
  __device__ void bring_all(const Problem& p, const Part& part) {
    const LatticeShape& shape = p.shape;
    warp = warp_index();
    resumed = !S::kPlain && part.resumed;
    objective = shape.objective;
    const int64_t place = (part.number * shape.heads + part.head) * shape.M * shape.D;
    const int64_t start = part.chunk.start, head = part.head;
    bring<S::kThreads>(memory, static_cast<const T*>(p.memories) + place, shape.D, shape.M, shape.D);
    bring<S::kThreads>(k, row_of<T>(p.k, part.batch(), start, head), p.k.stride[1], part.chunk.length,
                       shape.M);
    bring<S::kThreads>(h, row_of<T>(p.v, part.batch(), start, head), p.v.stride[1], part.chunk.length,
                       shape.D);
  }
  // Loads Delta, rounded; called by all threads.
  __device__ void bring_step(const In<4>& from, const LatticeShape& shape, const Part& part) const {
    const float* first = static_cast<const float*>(from.data) + offset_of(from, part.sequence(), part.head);
#pragma unroll 1
    for (int i = threadIdx.x; i < S::M * S::D; i += S::kThreads) {
      const int m = i % S::M, d = i / S::M;
      const bool exists = m < shape.M && d < shape.D;
      step.at(m, d) = from_float<T>(exists ? first[d * from.stride[2] + m * from.stride[3]] : 0.f);
    }
  }

  // The warp's block of products [tokens, D].
  __device__ int share_row() const { return warp % kBlocks * 16; }
  __device__ int share_col() const { return warp / kBlocks * S::kWide; }
  __device__ bool has_share() const { return share_col() < S::D; }
  __device__ int vectors() const { return 16 * warp; }  // index of the warp's vector 0

  // decode: H = K S^T - V, which replaces V. begin_h() does not need S; end_h() does.
  struct Share {
    Sums<S::kWide / 8> h;
    Operand<S::M / 16> k;
  };
  __device__ void begin_h(Share& share) const {
    if (!has_share()) return;
    const int row = share_row(), col = share_col();
    load_blocks(share.k, k, row);
    each_pair<S::kWide / 8>([&](int n, int i) {
      const float2 v = unpaired<T>(*reinterpret_cast<const uint32_t*>(&lane_at(h, row + 8 * i, col + 8 * n)));
      share.h.at[n][2 * i] = -v.x, share.h.at[n][2 * i + 1] = -v.y;
    });
  }
  __device__ void end_h(Share& share) const {
    if (!has_share()) return;
    const int row = share_row(), col = share_col();
    // Two accumulators halve the chain of dependent products; wide blocks have enough independent ones.
    constexpr bool kHalves = S::kWide == 16;
    Sums<kHalves ? 2 : 1> half;
    fill(half, 0.f);
#pragma unroll
    for (int i = 0; i < S::M / 16; ++i) {
      if constexpr (kHalves) {
        add_product<T>(i % 2 ? half : share.h, share.k.at[i], memory, 16 * i, col);
      } else {
        add_product<T>(share.h, share.k.at[i], memory, 16 * i, col);
      }
    }
#pragma unroll
    for (int n = 0; kHalves && n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) share.h.at[n][i] += half.at[n % (kHalves ? 2 : 1)][i];
    }
    Operand<S::kWide / 16> rounded;
    round_to<T>(rounded, share.h);
    __syncwarp();
    store_blocks(h, row, col, rounded);
  }
  __device__ void make_h() const {
    if (objective != LatticeObjective::decode) return;
    Share share;
    begin_h(share);
    end_h(share);
  }

  // a^T = S^T H^T
  __device__ void make_a(Sums<2>& a, int first) const {
    fill(a, 0.f);
#pragma unroll 4
    for (int d = 0; d < S::D; d += 16) {
      uint32_t s[4];
      load_block(s, memory, vectors(), d);
      add_product_transposed<T>(a, s, h, first, d);
    }
  }

  // W^T of tokens first..first+15: c = k or a - k times the token's weight, for the warp's s_i, as an A
  // fragment.
  __device__ void make_w_block(uint32_t (&to)[4], int first, const float* weights) const {
    if (objective != LatticeObjective::encode) {
      load_weighed_transposed<T>(to, k, vectors(), first, weights + first);
      return;
    }
    Sums<2> a, key;
    make_a(a, first);
    load_block_transposed(to, k, vectors(), first);
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
      make_w_block(x, first, tokens->lifted);
      store_block_transposed(w, vectors(), first, x);
    }
    __syncwarp();
  }

  // tril(G, -1) E, and the diagonal of G.
  __device__ void make_products() {
    if constexpr (Own) {
      Sums<2> g;
      product_of_rows(g, h, h);
      squares_of(squares, g);
      apply(g, 0, 0, [&](float x, int t, int j) { return j < t ? x * tokens->decay(t, j) : 0.f; });
      bound<T>(g);
      pack<T>(own, g);
      return;
    }
    score_blocks<T, S::kWarps>(decayed, h, h, warp, 0, [&](float g, int t, int j) {
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
        const float x = to_float(step.at(vectors() + row, d));
        sum = fmaf(x, x, sum);
      }
      sum = sum_over_col(sum_over_row(sum));
      if (lane() == 0) step_square[vectors() + row] = sum;
    }
    __syncwarp();
  }

  // a^T, W^T and N^T of tokens first..first+15.
  struct Columns {
    Sums<2> a, w, N;
  };
  __device__ void make_columns(Columns& to, int first) const {
    make_a(to.a, first);
    fill(to.N, 0.f);
    if (resumed) {
#pragma unroll 1
      for (int d = 0; d < S::D; d += 16) {
        uint32_t x[4];
        load_block(x, step, vectors(), d);
        add_product_transposed<T>(to.N, x, h, first, d);
      }
      scale_columns(to.N, [&](int n) {
        const float2 by = open(first, n);
        return float2{kLift * by.x, kLift * by.y};
      });
    }
    uint32_t x[4];
    if constexpr (Own) {
      load_block_transposed(x, w, vectors(), 0);
      mma<T>(to.N.at[0], x, own[0], own[2]);
      mma<T>(to.N.at[1], x, own[1], own[3]);
    } else {
#pragma unroll 1
      for (int j = 0; j <= first; j += 16) {
        load_block_transposed(x, w, vectors(), j);
        add_product_transposed<T>(to.N, x, decayed, first, j);
      }
    }
    unpack<T>(to.w, x);
    scale_rows(to.N, {1.f / kLift, 1.f / kLift});
    scale_rows(to.w, {1.f / kLift, 1.f / kLift});
  }
  __device__ float2 open(int first, int n) const {
    return *reinterpret_cast<const float2*>(&tokens->open[first + 8 * n + lane_col()]);
  }

  struct Carries {
    Carry sigma, r, n;
  };
  // sigma^T and y^T of tokens first..first+15; calls go in the order of tokens. y is negative where n is at
  // its floor.
  __device__ void make_read(Sums<2>& sigma, Sums<2>& y, const Columns& of, Carries& carries,
                            int first) const {
    Triangles triangles;
    make_triangles<Run::forward>(triangles, *tokens, first);
    const auto decay = [&](int col) { return block_decay<Run::forward>(*tokens, first, col); };
    const auto square = [&](int col) { return squared(decay(col)); };
    sigma = of.w;
    multiply(sigma, of.a);
    add_up<Run::forward>(sigma, triangles.decay, carries.sigma, decay);
    Sums<2> r, n;
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
    add_up<Run::forward>(r, triangles.square, carries.r, square);
    add_up<Run::forward>(n, triangles.square, carries.n, square);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 m = *reinterpret_cast<const float2*>(&tokens->kept[first + 8 * b + lane_col()]);
      float2 p = {0.f, 0.f};
      if (resumed) p = squared(open(first, b));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float before = 0.f;
        if (resumed) before = (i & 1 ? p.y : p.x) * step_square[vectors() + lane_row() + (i >> 1) * 8];
        const float kept = i & 1 ? m.y : m.x, floor = least_share<T>() * (r.at[b][i] + before);
        const float length = n.at[b][i] + before, inverse = rsqrtf(fmaf(kept, kept, fmaxf(length, floor)));
        y.at[b][i] = length < floor ? -inverse : inverse;
      }
    }
  }
};

// Replaces q by q~ = q y, scaled by 1 / lift(), and computes q~ (m - sigma), for tokens first..first+15 and
// the warp's s_i.
template <class W, class Keys>
__device__ inline void make_queries(const W& within, const Keys& q, const Keys& along, const Sums<2>& y,
                                    const Sums<2>& sigma, int first) {
  using T = typename W::T;
  uint32_t x[4];
  load_block_transposed(x, q, within.vectors(), first);
  Sums<2> query, scaled;
  unpack<T>(query, x);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 m = *reinterpret_cast<const float2*>(&within.tokens->kept[first + 8 * n + lane_col()]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      query.at[n][i] *= fabsf(y.at[n][i]);
      scaled.at[n][i] = query.at[n][i] * ((i & 1 ? m.y : m.x) - sigma.at[n][i]);
    }
  }
  scale_rows(query, {1.f / lift<T>(), 1.f / lift<T>()});
  bound<T>(query);
  pack<T>(x, query);
  __syncwarp();
  store_block_transposed(q, within.vectors(), first, x);
  pack<T>(x, scaled);
  store_block_transposed(along, within.vectors(), first, x);
}

// tril(x y^T) E, by the block's warps from warp `first` on.
template <class S, class X, class Y>
__device__ inline void decayed_scores(const Within<S>& within, const typename S::Scores& to, const X& x,
                                      const Y& y, int first) {
  score_blocks<typename S::T, S::kWarps>(to, x, y, within.warp, first, [&](float s, int t, int j) {
    return j <= t ? s * within.tokens->decay(t, j) : 0.f;
  });
}

// The same for one block of tokens, as an A fragment; each warp computes all of it.
template <class S, bool Own, class X, class Y>
__device__ inline void own_scores(uint32_t (&to)[4], const Within<S, Own>& within, const X& x, const Y& y) {
  using T = typename S::T;
  Sums<2> s;
  product_of_rows(s, x, y);
  apply(s, 0, 0, [&](float a, int t, int j) { return j <= t ? a * within.tokens->decay(t, j) : 0.f; });
  bound<T>(s);
  pack<T>(to, s);
}

}  // namespace girih::kernels::lattice

// The gates of one chunk, and the two reads that go through them:
//
//     value_read   y_i = e^{L_i} * (x_i H) + sum_{j<=i} a_ij e^{L_i - L_j} * s_j                  [M]
//     key_read     (f, W) of p:  f_i = e^{L_i} * p_i,  W_ij = sum_m p_im s_jm e^{L_im - L_jm}     j <= i
//
// H the chunk's first state, a_ij = x_i . y_j the scores, L_i the sum of g through row i, slot by slot. A
// block of four warps owns a chunk, a warp 16 of its rows.
//
// Where the gates of the whole chunk sum to little, e^{L_i - L_j} = r_i e^{X_j} with X_j = sum of g after j
// and r_i = e^{-X_i}: s~ = s e^X serves all rows, one exponential a token and slot. Elsewhere r overflows;
// there rows take the earlier 16-row blocks one by one, each with the end of that block as its reference, and
// the block of their own pair by pair: no exponent is above 0.
#pragma once

#include "gsa/gsa.h"
#include "tile/gates.h"
#include "tile/pack.h"

namespace girih::kernels {

// The largest sum of gates, in powers of two, that goes by the factors. bf16 has the range of fp32: r stays
// below 2^80, and products with logits and gradients below 2^127. fp16 ends at 2^-14 below and 2^16 above,
// and s~ must keep its digits.
template <typename T>
__device__ constexpr float factored_limit() {
  return sizeof(T) == 2 && std::is_same_v<T, __half> ? 2.f : 80.f;
}

// The rows of one chunk and memory head in a [B, T, heads, width] array.
template <typename T, template <int> class Array>
__device__ inline auto chunk_rows(const Array<4>& array, const Piece& piece, int head) {
  using Pointer = std::conditional_t<std::is_same_v<Array<4>, In<4>>, const T*, T*>;
  return static_cast<Pointer>(array.data) + piece.sequence.batch * array.stride[0] +
         piece.start * array.stride[1] + head * array.stride[2];
}

// All of the block: starts to load s, or writes 1 - e^g for it.
template <int Threads, typename T, int M>
__device__ inline void load_weights(const SharedTile<T, kChunk, M>& s, const In<4>& from, const In<4>& g,
                                    const Piece& piece, int head, int slots) {
  if (from.data != nullptr) {
    load_async<Threads>(s, chunk_rows<T>(from, piece, head), from.stride[1], piece.length, slots,
                        threadIdx.x);
    return;
  }
  const float* gates = chunk_rows<float>(g, piece, head);
  for (int i = threadIdx.x; i < kChunk * M / 4; i += Threads) {
    const int row = i / (M / 4), col = i % (M / 4) * 4;
    Pack<4> pack = zeros<4>();
    if (row < piece.length && col < slots) pack = load<4>(gates + row * g.stride[1] + col);
    *reinterpret_cast<uint2*>(&s.at(row, col)) = {pair_of<T>(-expm1f(pack.at[0]), -expm1f(pack.at[1])),
                                                  pair_of<T>(-expm1f(pack.at[2]), -expm1f(pack.at[3]))};
  }
}

// The scores of a warp's 16 rows against the chunk's 64, in two halves: the second is all masked for the
// first two warps, who skip it.
struct Scores {
  Sums<4> half[2];
};

__device__ inline void zero(Scores& a) {
  fill(a.half[0], 0.f);
  fill(a.half[1], 0.f);
}

// a += x y^T, columns after the warp's rows left out by halves.
template <typename T, int K, class Tile>
__device__ inline void add_scores(Scores& a, const Operand<K>& x, const Tile& y, int warp) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (h == 0 || warp >= 2) add_product_transposed<T>(a.half[h], x, y, 32 * h);
  }
}

// Zero where column > row.
__device__ inline void mask_causal(Scores& a, int warp) {
  const int row = 16 * warp + lane_row();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (32 * h + 8 * n + lane_col() + (i & 1) > row + (i >> 1) * 8) a.half[h].at[n][i] = 0.f;
      }
    }
  }
}

// sums += a y, masked or absent columns of a left out.
template <typename T, int N, class Tile>
__device__ inline void add_scored(Sums<N>& sums, const Operand<2> (&a)[2], const Tile& y, int warp) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (h == 0 || warp >= 2) add_product<T>(sums, a[h], y, 32 * h);
  }
}

template <typename T>
__device__ inline void round_to(Operand<2> (&to)[2], const Scores& a) {
  round_to<T>(to[0], a.half[0]);
  round_to<T>(to[1], a.half[1]);
}

// The 16 columns of block `block` of the scores.
__device__ inline void block_of(Sums<2>& to, const Scores& a, int block) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b != block) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to.at[n][i] = a.half[b >> 1].at[2 * (b & 1) + n][i];
    }
  }
}

// sums *= 2^{of(n)}, `of` the exponents of columns 8n + lane_col() and the next.
template <int N, class Exponents>
__device__ inline void scale_columns(Sums<N>& sums, const Exponents& of) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 x = of(n);
    const float2 decay = {exp2_fast(x.x), exp2_fast(x.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.at[n][i] *= i & 1 ? decay.y : decay.x;
  }
}

// A warp's view of its chunk's gates: sums of log2 e^g, slot by slot.
template <typename T, int M>
struct GateSums {
  static constexpr int N = M / 8;
  SharedTile<float, kChunk, M> g;
  float* totals;  // [4, M]: each warp's 16 rows
  int warp;
  bool factored;
  Sums<N> after;  // X_i where factors serve; else the sum after i within the warp's rows

  __device__ int row() const { return kRows * warp; }

  __device__ float2 total(int block, int n) const {
    return *reinterpret_cast<const float2*>(totals + block * M + 8 * n + lane_col());
  }
  // Of the rows from block `first` on; whole(n, 0) is L_C.
  __device__ float2 whole(int n, int first = 0) const {
    float2 all = {0.f, 0.f};
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float2 of = total(b, n);
      if (b >= first) all.x += of.x, all.y += of.y;
    }
    return all;
  }

  // Sums within the warp's rows: after each, or through each.
  __device__ void sum(Sums<N>& to, Sum which) const {
    uint32_t triangle[4];
    ones(triangle, which);
    fill(to, 0.f);
    add_gates(to, triangle, g, row());
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to.at[n][i] *= kLog2E;
    }
  }

  // By the whole block, after g has arrived. Has a barrier inside.
  __device__ void start() {
    sum(after, Sum::after);
    if (lane_row() == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int col = 8 * n + lane_col() + i;
          totals[warp * M + col] = after.at[n][i] + kLog2E * g.at(row(), col);
        }
      }
    }
    __syncthreads();
    bool small = true;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 all = whole(n);
      small = small && fminf(all.x, all.y) > -factored_limit<T>();
    }
    factored = __all_sync(~0u, small);  // the same for all warps: they see the same totals
    if (!factored) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 later = whole(n, warp + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) after.at[n][i] += i & 1 ? later.y : later.x;
    }
  }

  // g becomes, in the warp's rows, the sums through each row within them.
  __device__ void put_through() {
    Sums<N> through;
    sum(through, Sum::through);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        g.at(row() + lane_row() + 8 * (i >> 1), 8 * n + lane_col() + (i & 1)) = through.at[n][i];
      }
    }
    __syncwarp();
  }

  // Of row j of the warp's 16, after put_through().
  __device__ float2 through(int j, int n) const {
    return *reinterpret_cast<const float2*>(&g.at(row() + j, 8 * n + lane_col()));
  }
};

// Two neighbours of a tile, as floats.
template <typename T, class Tile>
__device__ inline float2 pair_at(const Tile& tile, int row, int col) {
  return unpaired<T>(*reinterpret_cast<const uint32_t*>(&tile.at(row, col)));
}

// tile *= 2^{sign * exponents}, the warp's rows.
template <typename T, int N, class Tile>
__device__ inline void scale_rows(const Tile& tile, int first, const Sums<N>& exponents, float sign) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane_row() + 8 * i, col = 8 * n + lane_col();
      const float2 x = pair_at<T>(tile, row, col);
      *reinterpret_cast<uint32_t*>(&tile.at(row, col)) = pair_of<T>(
          x.x * exp2_fast(sign * exponents.at[n][2 * i]), x.y * exp2_fast(sign * exponents.at[n][2 * i + 1]));
    }
  }
}

// The 16 x 16 scratch of a warp.
struct Scratch {
  float* at;

  __device__ void put(const Sums<2>& block) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        at[(lane_row() + 8 * (i >> 1)) * kRows + 8 * n + lane_col() + (i & 1)] = block.at[n][i];
      }
    }
    __syncwarp();
  }
  __device__ void get(Sums<2>& block) const {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        block.at[n][i] = at[(lane_row() + 8 * (i >> 1)) * kRows + 8 * n + lane_col() + (i & 1)];
      }
    }
    __syncwarp();
  }
  // Column j: of rows lane_row() and lane_row() + 8.
  __device__ float2 column(int j) const {
    return {at[lane_row() * kRows + j], at[(lane_row() + 8) * kRows + j]};
  }
  // By all lanes, from sums over the four lanes of a row.
  __device__ void put_column(int j, float above, float below) const {
    above = sum_over_row(above);
    below = sum_over_row(below);
    if (lane_col() == 0) {
      at[lane_row() * kRows + j] = above;
      at[(lane_row() + 8) * kRows + j] = below;
    }
  }
};

// The block `block` of the scores becomes `from`.
__device__ inline void set_block(Scores& a, const Sums<2>& from, int block) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b != block) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a.half[b >> 1].at[2 * (b & 1) + n][i] = from.at[n][i];
    }
  }
}

// The reads of a warp's rows. All members are called by the whole block.
template <typename T, int M>
struct RowReads {
  static constexpr int N = M / 8;
  GateSums<T, M> gates;
  // s: the weights times e^{sum of g after the row}, in the chunk or within its 16. raw: room for the weights
  // as they are, taken once the products with the state are done.
  SharedTile<T, kChunk, M> s, raw;
  Scratch scratch;

  // After g and s have arrived. Ends in a barrier.
  __device__ void start() {
    gates.start();
    if (gates.factored) scale_rows<T>(s, gates.row(), gates.after, 1.f);
    __syncthreads();
  }

  // Where factors do not serve, once, before the first read. Ends in a barrier.
  template <int Threads>
  __device__ void split(const In<4>& weights, const In<4>& g, const Piece& piece, int head, int slots) {
    if (gates.factored) return;
    __syncthreads();
    load_weights<Threads>(raw, weights, g, piece, head, slots);
    commit_copies();
    scale_rows<T>(s, gates.row(), gates.after, 1.f);
    gates.put_through();
    wait_copies<0>();
    __syncthreads();
  }

  // y, so far x H, becomes the value read. a: causal scores.
  __device__ void value_read(Sums<N>& y, const Scores& a) const {
    const int warp = gates.warp;
    if (gates.factored) {
      scale_columns(y, [&](int n) { return gates.whole(n); });
      Operand<2> scores[2];
      round_to<T>(scores, a);
      add_scored<T>(y, scores, s, warp);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y.at[n][i] *= exp2_fast(-gates.after.at[n][i]);
      }
      return;
    }
    // y <- e^{l} (... ((x H) e^{total 0} + a_0 s_0) e^{total 1} + ...)
#pragma unroll 1
    for (int b = 0; b < warp; ++b) {
      Sums<2> block;
      block_of(block, a, b);
      Operand<1> scores;
      round_to<T>(scores, block);
      scale_columns(y, [&](int n) { return gates.total(b, n); });
      add_product<T>(y, scores, s, kRows * b);
    }
    Sums<2> own;
    block_of(own, a, warp);
    scratch.put(own);
    Sums<N> through;
    own_through(through);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y.at[n][i] *= exp2_fast(through.at[n][i]);
    }
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      const float2 score = scratch.column(j);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 weight = pair_at<T>(raw, gates.row() + j, 8 * n + lane_col()), l = gates.through(j, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y.at[n][i] += (i < 2 ? score.x : score.y) * (i & 1 ? weight.y : weight.x) *
                        exp2_fast(fminf(through.at[n][i] - (i & 1 ? l.y : l.x), 0.f));
        }
      }
    }
    __syncwarp();
  }

  // p becomes f; W, causal.
  __device__ void key_read(Sums<N>& p, Scores& W) const {
    const int warp = gates.warp;
    zero(W);
    if (gates.factored) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p.at[n][i] *= exp2_fast(-gates.after.at[n][i]);
      }
      Operand<N / 2> x;
      round_to<T>(x, p);
      add_scores<T>(W, x, s, warp);
      scale_columns(p, [&](int n) { return gates.whole(n); });
      mask_causal(W, warp);
      return;
    }
    Sums<N> through;
    own_through(through);
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      float above = 0.f, below = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 weight = pair_at<T>(raw, gates.row() + j, 8 * n + lane_col()), l = gates.through(j, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          (i < 2 ? above : below) += p.at[n][i] * (i & 1 ? weight.y : weight.x) *
                                     exp2_fast(fminf(through.at[n][i] - (i & 1 ? l.y : l.x), 0.f));
        }
      }
      scratch.put_column(j, above, below);
    }
    Sums<2> block;
    scratch.get(block);
    set_block(W, block, warp);
    // The earlier blocks, from the nearest: f takes on one block's decay after the other.
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p.at[n][i] *= exp2_fast(through.at[n][i]);
    }
#pragma unroll 1
    for (int b = warp - 1; b >= 0; --b) {
      Operand<N / 2> x;
      round_to<T>(x, p);
      fill(block, 0.f);
      add_product_transposed<T>(block, x, s, kRows * b);
      set_block(W, block, b);
      scale_columns(p, [&](int n) { return gates.total(b, n); });
    }
    mask_causal(W, warp);
  }

  __device__ void own_through(Sums<N>& to) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 above = gates.through(lane_row(), n), below = gates.through(lane_row() + 8, n);
      to.at[n][0] = above.x, to.at[n][1] = above.y, to.at[n][2] = below.x, to.at[n][3] = below.y;
    }
  }
};

}  // namespace girih::kernels

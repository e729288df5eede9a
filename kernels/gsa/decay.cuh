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
    *reinterpret_cast<uint2*>(&s.at(row, col)) = {pair_of<T>(complement(pack.at[0]), complement(pack.at[1])),
                                                  pair_of<T>(complement(pack.at[2]), complement(pack.at[3]))};
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

// Two neighbours of a tile, as floats.
template <typename T, class Tile>
__device__ inline float2 pair_at(const Tile& tile, int row, int col) {
  return unpaired<T>(*reinterpret_cast<const uint32_t*>(&tile.at(row, col)));
}

// sums *= factors, `factors(n)` those of columns 8n + lane_col() and the next.
template <int N, class Factors>
__device__ inline void scale_columns(Sums<N>& sums, const Factors& factors) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 factor = factors(n);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.at[n][i] *= i & 1 ? factor.y : factor.x;
  }
}

// tile *= factors, 16 rows from `first` on.
template <typename T, int N, class Tile>
__device__ inline void scale_rows(const Tile& tile, int first, const Sums<N>& factors) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane_row() + 8 * i, col = 8 * n + lane_col();
      const float2 x = pair_at<T>(tile, row, col);
      *reinterpret_cast<uint32_t*>(&tile.at(row, col)) =
          pair_of<T>(x.x * factors.at[n][2 * i], x.y * factors.at[n][2 * i + 1]);
    }
  }
}

// A warp's view of its chunk's gates in shared memory, sums of log2 e^g slot by slot.
template <int M>
struct Gates {
  static constexpr int N = M / 8;
  SharedTile<float, kChunk, M>
      g;          // where factors do not serve, after split(): the sums through each row of its 16
  float* totals;  // [4, M]: sums of each 16 rows
  float* decay;   // [M]: e^{L_C}
  int warp;

  __device__ int row() const { return kRows * warp; }
  __device__ float2 total(int block, int n) const {
    return *reinterpret_cast<const float2*>(totals + block * M + 8 * n + lane_col());
  }
  __device__ float2 block_decay(int block, int n) const {
    const float2 sum = total(block, n);
    return {exp2_fast(sum.x), exp2_fast(sum.y)};
  }
  __device__ float2 chunk_decay(int n) const {
    return *reinterpret_cast<const float2*>(decay + 8 * n + lane_col());
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

  // By the whole block, after g has arrived: X of the warp's rows, and whether factors serve (the same answer
  // in all warps). Has a barrier inside; decay is seen after the next.
  template <typename T>
  __device__ bool start(Sums<N>& after) const {
    sum(after, Sum::after);
    if (lane_row() == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int col = 8 * n + lane_col();
        const float2 first = *reinterpret_cast<const float2*>(&g.at(row(), col));
        *reinterpret_cast<float2*>(totals + warp * M + col) = {after.at[n][0] + kLog2E * first.x,
                                                               after.at[n][1] + kLog2E * first.y};
      }
    }
    __syncthreads();
    bool small = true;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float2 all = {0.f, 0.f}, later = {0.f, 0.f};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float2 of = total(b, n);
        all.x += of.x, all.y += of.y;
        later.x += b > warp ? of.x : 0.f, later.y += b > warp ? of.y : 0.f;
      }
      small = small && fminf(all.x, all.y) > -factored_limit<T>();
#pragma unroll
      for (int i = 0; i < 4; ++i) after.at[n][i] += i & 1 ? later.y : later.x;
      if (n % 4 == warp && lane_row() == 0) {
        *reinterpret_cast<float2*>(decay + 8 * n + lane_col()) = {exp2_fast(all.x), exp2_fast(all.y)};
      }
    }
    return __all_sync(~0u, small);
  }

  // Where factors do not serve: the sums through each row take g's place in the warp's rows.
  __device__ __noinline__ static void split(const Gates gates) {
    Sums<N> through;
    gates.sum(through, Sum::through);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(&gates.g.at(gates.row() + lane_row() + 8 * i, 8 * n + lane_col())) = {
            through.at[n][2 * i], through.at[n][2 * i + 1]};
      }
    }
    __syncwarp();
  }

  // After split(), of row j of the warp's 16.
  __device__ float2 through(int j, int n) const {
    return *reinterpret_cast<const float2*>(&g.at(row() + j, 8 * n + lane_col()));
  }
  // e^{sum through each row}, and e^{sum after it}.
  __device__ void through(Sums<N>& to) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 sum = through(lane_row() + 8 * i, n);
        to.at[n][2 * i] = sum.x, to.at[n][2 * i + 1] = sum.y;
      }
    }
  }
  __device__ void decay_through(Sums<N>& to) const {
    through(to);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to.at[n][i] = exp2_fast(to.at[n][i]);
    }
  }
  __device__ void decay_after(Sums<N>& to) const {
    through(to);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 all = through(kRows - 1, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) to.at[n][i] = exp2_fast((i & 1 ? all.y : all.x) - to.at[n][i]);
    }
  }
};

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

// Row i of the warp's 16 against row j, slot by slot: x_i e^{l_i - l_j}, masked by min (row j later than i).
__device__ inline float decay_between(float later, float earlier) {
  return exp2_fast(fminf(later - earlier, 0.f));
}

// The reads of a warp's rows. All members are called by the whole block.
template <typename T, int M>
struct RowReads {
  static constexpr int N = M / 8;
  using Tile = SharedTile<T, kChunk, M>;

  // What the reads by blocks need, all in shared memory. s: the weights times e^{sum of g after the row}, in
  // the chunk or within its 16. raw: room for the weights as they are, taken once the products with the state
  // are done.
  struct Shared {
    Gates<M> gates;
    Tile s, raw;
    Scratch scratch;
  };
  Shared at;
  bool factored;
  Sums<N> r;  // e^{-X}, where factors serve

  // After g and s have arrived. Ends in a barrier.
  __device__ void start() {
    factored = at.gates.template start<T>(r);
    if (factored) {
      Sums<N> after;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          after.at[n][i] = exp2_fast(r.at[n][i]);
          r.at[n][i] = exp2_fast(-r.at[n][i]);
        }
      }
      scale_rows<T>(at.s, at.gates.row(), after);
    }
    __syncthreads();
  }

  // Where factors do not serve, once, before the first read. Ends in a barrier.
  template <int Threads>
  __device__ void split(const In<4>& weights, const In<4>& g, const Piece& piece, int head, int slots) {
    if (factored) return;
    __syncthreads();
    load_weights<Threads>(at.raw, weights, g, piece, head, slots);
    commit_copies();
    split_by_blocks(at);
    wait_copies<0>();
    __syncthreads();
  }

  // y, so far x H, becomes the value read. a: causal scores.
  __device__ void value_read(Sums<N>& y, const Scores& a) const {
    if (!factored) {
      Sums<N> copy = y;
      const Scores scores = a;
      value_read_by_blocks(at, copy, scores);
      y = copy;
      return;
    }
    scale_columns(y, [&](int n) { return at.gates.chunk_decay(n); });
    Operand<2> scores[2];
    round_to<T>(scores, a);
    add_scored<T>(y, scores, at.s, at.gates.warp);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y.at[n][i] *= r.at[n][i];
    }
  }

  // p becomes f; W, causal.
  __device__ void key_read(Sums<N>& p, Scores& W) const {
    if (!factored) {
      Sums<N> copy = p;
      Scores scores;
      key_read_by_blocks(at, copy, scores);
      p = copy;
      W = scores;
      return;
    }
    zero(W);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p.at[n][i] *= r.at[n][i];
    }
    Operand<N / 2> x;
    round_to<T>(x, p);
    add_scores<T>(W, x, at.s, at.gates.warp);
    scale_columns(p, [&](int n) { return at.gates.chunk_decay(n); });
    mask_causal(W, at.gates.warp);
  }

 private:
  // Rarely run, and large: calls of their own, lest they take registers from the rest.
  __device__ __noinline__ static void split_by_blocks(const Shared at) {
    Gates<M>::split(at.gates);
    Sums<N> after;
    at.gates.decay_after(after);
    scale_rows<T>(at.s, at.gates.row(), after);
  }

  __device__ __noinline__ static void value_read_by_blocks(const Shared at, Sums<N>& y, const Scores& a) {
    const Gates<M>& gates = at.gates;
    // y <- e^{l} (... ((x H) e^{total 0} + a_0 s_0) e^{total 1} + ...)
    Sums<2> block;
#pragma unroll 1
    for (int b = 0; b < gates.warp; ++b) {
      block_of(block, a, b);
      Operand<1> scores;
      round_to<T>(scores, block);
      scale_columns(y, [&](int n) { return gates.block_decay(b, n); });
      add_product<T>(y, scores, at.s, kRows * b);
    }
    block_of(block, a, gates.warp);
    at.scratch.put(block);
    Sums<N> through;
    gates.through(through);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y.at[n][i] *= exp2_fast(through.at[n][i]);
    }
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      const float2 score = at.scratch.column(j);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 weight = pair_at<T>(at.raw, gates.row() + j, 8 * n + lane_col()),
                     l = gates.through(j, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y.at[n][i] += (i < 2 ? score.x : score.y) * (i & 1 ? weight.y : weight.x) *
                        decay_between(through.at[n][i], i & 1 ? l.y : l.x);
        }
      }
    }
    __syncwarp();
  }

  __device__ __noinline__ static void key_read_by_blocks(const Shared at, Sums<N>& p, Scores& W) {
    const Gates<M>& gates = at.gates;
    zero(W);
    Sums<N> through;
    gates.through(through);
#pragma unroll 1
    for (int j = 0; j < kRows; ++j) {
      float above = 0.f, below = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 weight = pair_at<T>(at.raw, gates.row() + j, 8 * n + lane_col()),
                     l = gates.through(j, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          (i < 2 ? above : below) +=
              p.at[n][i] * (i & 1 ? weight.y : weight.x) * decay_between(through.at[n][i], i & 1 ? l.y : l.x);
        }
      }
      at.scratch.put_column(j, above, below);
    }
    Sums<2> block;
    at.scratch.get(block);
    set_block(W, block, gates.warp);
    // The earlier blocks, from the nearest: f takes on one block's decay after the other.
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p.at[n][i] *= exp2_fast(through.at[n][i]);
    }
#pragma unroll 1
    for (int b = gates.warp - 1; b >= 0; --b) {
      Operand<N / 2> x;
      round_to<T>(x, p);
      fill(block, 0.f);
      add_product_transposed<T>(block, x, at.s, kRows * b);
      set_block(W, block, b);
      scale_columns(p, [&](int n) { return gates.block_decay(b, n); });
    }
    mask_causal(W, gates.warp);
  }
};

}  // namespace girih::kernels

// The mirror of decay.cuh's reads, for the gradients of a chunk's key rows j:
//
//     key_write    (f, W) of s:  f_j = e^{L_C - L_j} * s_j,  W_jt = sum_m s_jm y_tm e^{L_tm - L_jm}     t >=
//     j value_write  u_j = e^{L_C - L_j} * (x_j G) + sum_{t>=j} a_jt e^{L_t - L_j} * y_t [M]
//
// G the gradient of the state after the chunk, y what later rows gave to the memory. Where factors serve,
// e^{L_t - L_j} = e^{X_j} r_t; elsewhere 16-row blocks again, from the last, and pairs within a block.
#pragma once

#include "gsa/decay.cuh"

namespace girih::kernels {

// Scores of a warp's rows against the rows of the chunk from them on: the first half is all masked for the
// last two warps.
__device__ inline bool later_half(int h, int warp) { return h == 1 || warp < 2; }

template <typename T, int K, class Tile>
__device__ inline void add_later_scores(Scores& a, const Operand<K>& x, const Tile& y, int warp) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (later_half(h, warp)) add_product_transposed<T>(a.half[h], x, y, 32 * h);
  }
}

// Zero where column < row.
__device__ inline void mask_later(Scores& a, int warp) {
  const int row = 16 * warp + lane_row();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (32 * h + 8 * n + lane_col() + (i & 1) < row + (i >> 1) * 8) a.half[h].at[n][i] = 0.f;
      }
    }
  }
}

template <typename T, int N, class Tile>
__device__ inline void add_later_scored(Sums<N>& sums, const Operand<2> (&a)[2], const Tile& y, int warp) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (later_half(h, warp)) add_product<T>(sums, a[h], y, 32 * h);
  }
}

// The gradients that a warp's rows get. All members are called by the whole block.
template <typename T, int M>
struct RowWrites {
  static constexpr int N = M / 8;
  using Tile = SharedTile<T, kChunk, M>;

  struct Shared {
    Gates<M> gates;
    Tile s;  // the weights as they are
    Scratch scratch;

    __device__ float2 weight(int i, int n) const {
      return pair_at<T>(s, gates.row() + lane_row() + 8 * i, 8 * n + lane_col());
    }
  };
  Shared at;
  bool factored;
  Sums<N> r;           // e^{-X}, where factors serve
  Operand<N / 2> end;  // s e^{L_C - L_j}

  // After g and s have arrived.
  __device__ void start() {
    factored = at.gates.template start<T>(r);
    Sums<N> weights;
    if (!factored) {
      Sums<N> copy;
      split_by_blocks(at, copy);
      weights = copy;
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 w = at.weight(i, n);
          weights.at[n][2 * i] = w.x * exp2_fast(r.at[n][2 * i]);
          weights.at[n][2 * i + 1] = w.y * exp2_fast(r.at[n][2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) r.at[n][i] = exp2_fast(-r.at[n][i]);
      }
    }
    round_to<T>(end, weights);
  }

  // u, before finish(), gets x = X G; rest the sum of s_j e^{L_C - L_j} x_j over the lane's rows.
  __device__ void add_end(Sums<N>& u, float2 (&rest)[N], const Sums<N>& x) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 s = unpaired<T>(end.at[n / 2][2 * (n % 2) + i]);
        rest[n].x += s.x * x.at[n][2 * i], rest[n].y += s.y * x.at[n][2 * i + 1];
      }
    }
    Sums<N> decayed = x;
    if (!factored) decay_end_by_blocks(at, decayed);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) u.at[n][i] += decayed.at[n][i];
    }
  }

  // u, before finish(), gets the chunk's own part of value_write; W is that of key_write. y's tile is scaled
  // on the way. a: scores against later rows. Has barriers; ends without one.
  __device__ void write(Sums<N>& u, Scores& W, const Scores& a, const Tile& y) const {
    if (!factored) {
      Sums<N> copy = u;
      Scores written;
      const Scores scores = a;
      write_by_blocks(at, y, copy, written, scores);
      u = copy;
      W = written;
      return;
    }
    const int warp = at.gates.warp;
    scale_rows<T>(y, at.gates.row(), r);
    __syncthreads();
    zero(W);
    add_later_scores<T>(W, end, y, warp);
    mask_later(W, warp);
    Operand<2> scores[2];
    round_to<T>(scores, a);
    add_later_scored<T>(u, scores, y, warp);
  }

  __device__ void finish(Sums<N>& u) const {
    if (!factored) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) u.at[n][i] = __fdividef(u.at[n][i], r.at[n][i]);
    }
  }

 private:
  // Rarely run, and large: calls of their own, lest they take registers from the rest.
  __device__ __noinline__ static void split_by_blocks(const Shared at, Sums<N>& weights) {
    Gates<M>::split(at.gates);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 w = at.weight(i, n);
        weights.at[n][2 * i] = w.x, weights.at[n][2 * i + 1] = w.y;
      }
    }
    decay_end_by_blocks(at, weights);
  }

  // x *= e^{L_C - L_j}
  __device__ __noinline__ static void decay_end_by_blocks(const Shared at, Sums<N>& x) {
    Sums<N> after;
    at.gates.decay_after(after);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x.at[n][i] *= after.at[n][i];
    }
#pragma unroll 1
    for (int b = at.gates.warp + 1; b < 4; ++b) {
      scale_columns(x, [&](int n) { return at.gates.block_decay(b, n); });
    }
  }

  __device__ __noinline__ static void write_by_blocks(const Shared at, const Tile y, Sums<N>& u, Scores& W,
                                                      const Scores& a) {
    const Gates<M>& gates = at.gates;
    const int warp = gates.warp;
    zero(W);
    // The warp's own 16 columns, pair by pair.
    Sums<2> block;
    block_of(block, a, warp);
    at.scratch.put(block);
    Sums<N> through;
    gates.through(through);
#pragma unroll 1
    for (int t = 0; t < kRows; ++t) {
      const float2 score = at.scratch.column(t);
      __syncwarp();
      float above = 0.f, below = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 value = pair_at<T>(y, gates.row() + t, 8 * n + lane_col()), l = gates.through(t, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 w = at.weight(i >> 1, n);
          const float decayed =
              (i & 1 ? value.y : value.x) * decay_between(i & 1 ? l.y : l.x, through.at[n][i]);
          u.at[n][i] += (i < 2 ? score.x : score.y) * decayed;
          (i < 2 ? above : below) += (i & 1 ? w.y : w.x) * decayed;
        }
      }
      at.scratch.put_column(t, above, below);
      __syncwarp();
    }
    at.scratch.get(block);
    set_block(W, block, warp);
    __syncthreads();
    gates.decay_through(through);
    scale_rows<T>(y, gates.row(), through);
    __syncthreads();
    // The later blocks: W from the nearest, u from the last.
    Sums<N> after, x;
    gates.decay_after(after);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 w = at.weight(i >> 1, n);
        x.at[n][i] = (i & 1 ? w.y : w.x) * after.at[n][i];
      }
    }
#pragma unroll 1
    for (int b = warp + 1; b < 4; ++b) {
      Operand<N / 2> weights;
      round_to<T>(weights, x);
      fill(block, 0.f);
      add_product_transposed<T>(block, weights, y, kRows * b);
      set_block(W, block, b);
      scale_columns(x, [&](int n) { return gates.block_decay(b, n); });
    }
    mask_later(W, warp);
    fill(x, 0.f);
#pragma unroll 1
    for (int b = 3; b > warp; --b) {
      block_of(block, a, b);
      Operand<1> scores;
      round_to<T>(scores, block);
      scale_columns(x, [&](int n) { return gates.block_decay(b, n); });
      add_product<T>(x, scores, y, kRows * b);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) u.at[n][i] += x.at[n][i] * after.at[n][i];
    }
  }
};

}  // namespace girih::kernels

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
  GateSums<T, M> gates;
  SharedTile<T, kChunk, M> s;  // the weights as they are
  Scratch scratch;

  // After g and s have arrived.
  __device__ void start() {
    gates.start();
    if (!gates.factored) gates.put_through();
  }

  __device__ float2 weight(int i, int n) const {
    return pair_at<T>(s, gates.row() + lane_row() + 8 * i, 8 * n + lane_col());
  }

  // s e^{sum after}: in the chunk where factors serve, else within the warp's rows.
  __device__ void decayed_weights(Operand<N / 2>& to) const {
    Sums<N> x;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 w = weight(i, n);
        x.at[n][2 * i] = w.x * exp2_fast(gates.after.at[n][2 * i]);
        x.at[n][2 * i + 1] = w.y * exp2_fast(gates.after.at[n][2 * i + 1]);
      }
    }
    round_to<T>(to, x);
  }

  // f alone.
  __device__ void end_weights(Operand<N / 2>& f) const {
    if (gates.factored) return decayed_weights(f);
    Sums<N> x;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 later = gates.whole(n, gates.warp + 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 w = weight(i, n);
        x.at[n][2 * i] = w.x * exp2_fast(gates.after.at[n][2 * i] + later.x);
        x.at[n][2 * i + 1] = w.y * exp2_fast(gates.after.at[n][2 * i + 1] + later.y);
      }
    }
    round_to<T>(f, x);
  }

  // x, so far x G, times e^{L_C - L_j}.
  __device__ void decay_from_end(Sums<N>& x) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float2 later = {0.f, 0.f};
      if (!gates.factored) later = gates.whole(n, gates.warp + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.at[n][i] *= exp2_fast(gates.after.at[n][i] + (i & 1 ? later.y : later.x));
      }
    }
  }

  // u += the chunk's own part of value_write, W: that of key_write. y's tile is scaled on the way. a: scores
  // against later rows. Has barriers; ends without one.
  __device__ void write(Sums<N>& u, Scores& W, const Scores& a, const SharedTile<T, kChunk, M>& y) const {
    const int warp = gates.warp;
    zero(W);
    if (gates.factored) {
      scale_rows<T>(y, gates.row(), gates.after, -1.f);
      __syncthreads();
      Operand<N / 2> weights;
      decayed_weights(weights);
      add_later_scores<T>(W, weights, y, warp);
      mask_later(W, warp);
      Operand<2> scores[2];
      round_to<T>(scores, a);
      Sums<N> x;
      fill(x, 0.f);
      add_later_scored<T>(x, scores, y, warp);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) u.at[n][i] += x.at[n][i] * exp2_fast(gates.after.at[n][i]);
      }
      return;
    }
    // The warp's own 16 columns, pair by pair.
    Sums<2> block;
    block_of(block, a, warp);
    scratch.put(block);
    Sums<N> through;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 above = gates.through(lane_row(), n), below = gates.through(lane_row() + 8, n);
      through.at[n][0] = above.x, through.at[n][1] = above.y;
      through.at[n][2] = below.x, through.at[n][3] = below.y;
    }
#pragma unroll 1
    for (int t = 0; t < kRows; ++t) {
      const float2 score = scratch.column(t);
      __syncwarp();
      float above = 0.f, below = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 value = pair_at<T>(y, gates.row() + t, 8 * n + lane_col()), l = gates.through(t, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 w = weight(i >> 1, n);
          const float decayed =
              (i & 1 ? value.y : value.x) * exp2_fast(fminf((i & 1 ? l.y : l.x) - through.at[n][i], 0.f));
          u.at[n][i] += (i < 2 ? score.x : score.y) * decayed;
          (i < 2 ? above : below) += (i & 1 ? w.y : w.x) * decayed;
        }
      }
      scratch.put_column(t, above, below);
      __syncwarp();
    }
    scratch.get(block);
    set_block(W, block, warp);
    __syncthreads();
    scale_rows<T>(y, gates.row(), through, 1.f);
    __syncthreads();
    // The later blocks: W from the nearest, u from the last.
    Sums<N> x;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 w = weight(i >> 1, n);
        x.at[n][i] = (i & 1 ? w.y : w.x) * exp2_fast(gates.after.at[n][i]);
      }
    }
#pragma unroll 1
    for (int b = warp + 1; b < 4; ++b) {
      Operand<N / 2> weights;
      round_to<T>(weights, x);
      fill(block, 0.f);
      add_product_transposed<T>(block, weights, y, kRows * b);
      set_block(W, block, b);
      scale_columns(x, [&](int n) { return gates.total(b, n); });
    }
    mask_later(W, warp);
    fill(x, 0.f);
#pragma unroll 1
    for (int b = 3; b > warp; --b) {
      block_of(block, a, b);
      Operand<1> scores;
      round_to<T>(scores, block);
      scale_columns(x, [&](int n) { return gates.total(b, n); });
      add_product<T>(x, scores, y, kRows * b);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) u.at[n][i] += x.at[n][i] * exp2_fast(gates.after.at[n][i]);
    }
  }
};

}  // namespace girih::kernels

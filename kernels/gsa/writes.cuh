// The mirror of reads.cuh: the gradients of the key rows j of a chunk:
//
//     key_write    (f, W) of s:  f_j = e^{L_C - L_j} * s_j,  W_jt = sum_m s_jm y_tm e^{L_tm - L_jm},  t >= j
//     value_write  u_j = e^{L_C - L_j} * (x_j G) + sum_{t>j} a_jt e^{L_t - L_j} * y_t,                    [M]
//
// G is the gradient of the state after the chunk, and y are the weights of the reads of later rows. u does
// not contain the terms of the rows' own tokens. With factors, e^{L_t - L_j} = e^{X_j} r_t. Without factors,
// rows use blocks of 16 rows from the last block, and pairs of rows within a block.
#pragma once

#include "gsa/chunk_gates.cuh"
#include "gsa/scores.cuh"

namespace girih::kernels {

// The gradients of the rows of a warp. A block has a warpgroup for each 64 of the M columns. All warpgroups
// use all rows and gates; each has its columns of u.
template <typename T, int M>
struct RowWrites {
  static constexpr int N = M / 8;
  using Tile = SharedTile<T, kChunk, M>;
  using Own = Sums<8>;  // the columns of the warpgroup

  // The operands in shared memory.
  struct Shared {
    Gates<M> gates;
    Tile s;    // the weights, unscaled; with factors: the rounding error of s e^X
    Tile end;  // s e^{L_C - L_j}; with factors: s e^X
    Scratch scratch;
    int group;
    float y_scale;  // factor of y, without factors

    __device__ float2 weight(int i, int n) const { return lane_pair<T>(s, gates.row() + 8 * i, 8 * n); }
  };
  Shared at;
  bool factored;

  __device__ int first_column() const { return 64 * at.group; }

  // Called by all warps of the block after g and s are loaded. Ends with a barrier.
  template <int Warps>
  __device__ void start() {
    const Tile s = at.s, end = at.end;
    factored = factor_gates<T, Warps, M>(at.gates.g, at.gates.decay, [&](int row, int col, float2 weight) {
      const float2 raw = lane_pair<T>(s, row, col), exact = {raw.x * weight.x, raw.y * weight.y};
      const uint32_t rounded = pair_of<T>(exact.x, exact.y);
      const float2 back = unpaired<T>(rounded);
      *reinterpret_cast<uint32_t*>(&lane_at(end, row, col)) = rounded;
      put_lane_pair<T>(s, row, col, exact.x - back.x, exact.y - back.y);
    });
    if (!factored) {
      if (at.group == 0) at.gates.split();
      __syncthreads();
      if (at.group == 0) end_by_blocks(at);
    }
    __syncthreads();
  }

  // With factors, y multiplied by r: W of key_write, rounded.
  __device__ void key_write(Operand<2> (&w)[2], const Tile& y) const {
    Scores W;
    zero(W);
#pragma unroll 2
    for (int m = 0; m < M; m += 16) {
      uint32_t weights[4];
      load_block(weights, at.end, at.gates.row(), m);
      add_scores<Side::later, T>(W, weights, y, m, at.gates.warp);
    }
    round_scores<Side::later, true, T>(w, W, at.gates.warp);
  }
  // With factors, u = x G: writes u times the rounding error of s e^X over s, for dg.
  __device__ void keep_rounding(const Own& u) const {
    each_pair<8>([&](int n, int i) {
      const int row = at.gates.row() + 8 * i, col = first_column() + 8 * n;
      const float2 s = lane_pair<T>(at.s, row, col);
      put_lane_pair<T>(at.s, row, col, s.x * u.at[n][2 * i], s.y * u.at[n][2 * i + 1]);
    });
  }
  // With factors: adds the terms of the chunk's rows to u, without e^X.
  __device__ void value_write(Own& u, const Operand<2> (&scores)[2], const Tile& y) const {
    add_scored<Side::later, T>(u, scores, y, at.gates.warp, first_column());
  }

  // Without factors: u contains x G and becomes value_write. Scales y in place. Has barriers of the block.
  __device__ void write_by_blocks(Own& u, Operand<2> (&w)[2], const Scores& a, const Tile& y) const {
    Sums<N> all;
    fill(all, 0.f);
    each_sum<N>([&](int n, int i) { all.at[n][i] = n / 8 == at.group ? u.at[n % 8][i] : 0.f; });
    Scores W;
    const Scores scores = a;
    decay_end_by_blocks(at, all);
    write_pairs(at, y, all, W, scores);
    each_sum<N>([&](int n, int i) {
      if (n / 8 == at.group) u.at[n % 8][i] = all.at[n][i];
    });
    round_scores<Side::later, true, T>(w, W, at.gates.warp);
  }

 private:
  // Not inlined: these functions are large and rarely called, and their registers would count for the fast
  // path.
  __device__ __noinline__ static void end_by_blocks(const Shared at) {
    Sums<N> weights;
    take_rows<T>(weights, at.s, at.gates.row());
    decay_end_by_blocks(at, weights);
    each_pair<N>([&](int n, int i) {
      put_lane_pair<T>(at.end, at.gates.row() + 8 * i, 8 * n, weights.at[n][2 * i], weights.at[n][2 * i + 1]);
    });
  }

  // x *= e^{L_C - L_j}
  __device__ __noinline__ static void decay_end_by_blocks(const Shared at, Sums<N>& x) {
    Sums<N> after;
    at.gates.decay_after(after);
    multiply(x, after);
#pragma unroll 1
    for (int b = at.gates.warp + 1; b < 4; ++b) {
      scale_columns(x, [&](int n) { return at.gates.block_decay(b, n); });
    }
  }

  __device__ __noinline__ static void write_pairs(const Shared at, const Tile y, Sums<N>& u, Scores& W,
                                                  const Scores& a) {
    const Gates<M>& gates = at.gates;
    const int warp = gates.warp;
    zero(W);
    // The warp's own 16 columns, by pairs of rows.
    Sums<2> block;
    block_of(block, a, warp);
    at.scratch.put(block);
    Sums<N> through;
    gates.through(through);
#pragma unroll 1
    for (int t = 0; t < kRows; ++t) {
      float2 score = at.scratch.column(t);
      if (t <= lane_row()) score.x = 0.f;
      if (t <= lane_row() + 8) score.y = 0.f;
      const bool in_order[2] = {t >= lane_row(), t >= lane_row() + 8};
      __syncwarp();
      float above = 0.f, below = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float2 value = pair_at<T>(y, gates.row() + t, 8 * n + lane_col());
        const float2 l = gates.through(t, n);
        value.x *= at.y_scale, value.y *= at.y_scale;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 w = at.weight(i >> 1, n);
          const float decayed = (i & 1 ? value.y : value.x) *
                                decay_between(i & 1 ? l.y : l.x, through.at[n][i], in_order[i >> 1]);
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
    scale_columns(through, [&](int) { return float2{at.y_scale, at.y_scale}; });
    if (at.group == 0) scale_rows<T>(y, gates.row(), through);
    __syncthreads();
    // The later blocks: W from the nearest block to the last, u from the last to the nearest.
    Sums<N> after, x;
    gates.decay_after(after);
    each_sum<N>([&](int n, int i) {
      const float2 w = at.weight(i >> 1, n);
      x.at[n][i] = (i & 1 ? w.y : w.x) * after.at[n][i];
    });
#pragma unroll 1
    for (int b = warp + 1; b < 4; ++b) {
      Operand<N / 2> weights;
      round_to<T>(weights, x);
      fill(block, 0.f);
      add_product_transposed<T>(block, weights, y, kRows * b);
      set_block(W, block, b);
      scale_columns(x, [&](int n) { return gates.block_decay(b, n); });
    }
    fill(x, 0.f);
#pragma unroll 1
    for (int b = 3; b > warp; --b) {
      block_of(block, a, b);
      Operand<1> scores;
      round_to<T>(scores, block);
      scale_columns(x, [&](int n) { return gates.block_decay(b, n); });
      add_product<T>(x, scores, y, kRows * b);
    }
    each_sum<N>([&](int n, int i) { u.at[n][i] += x.at[n][i] * after.at[n][i]; });
  }
};

}  // namespace girih::kernels

// The mirror of reads.cuh: the gradients of the key rows j of a chunk. Row j uses the rows t >= j:
//
//     key_write    f_j = e^{L_C - L_j} * s_j,  W_jt = sum_m s_jm y_tm e^{L_tm - L_jm},  t >= j
//     value_write  u_j = e^{L_C - L_j} * (x_j G) + sum_{t>j} a_jt e^{L_t - L_j} * y_t                     [M]
//
// G [width, M] is the gradient of the state after the chunk, y_t are the weights of the read of row t, and
// a_jt are the scores of row j with row t. u does not contain the terms of the rows' own tokens. With
// factors, e^{L_t - L_j} = e^{X_j} r_t (chunk_gates.cuh). Without factors, a row uses the later sub-chunks of
// 16 rows one by one, and the rows of its own sub-chunk one by one.
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
  using WarpgroupSums = Accumulator<8>;  // the columns of the warpgroup

  // Tiles in shared memory.
  struct Operands {
    Gates<M> gates;
    Tile s;          // the weights, unscaled; with factors: the rounding error of decayed_s
    Tile decayed_s;  // f_j = s e^{L_C - L_j}; with factors in fp16 times 2^factor_shift
    Scratch scratch;
    int warpgroup;
    float y_scale;  // factor of y, without factors

    __device__ float2 weight(int i, int n) const { return load_lane_pair<T>(s, gates.row() + 8 * i, 8 * n); }
  };
  Operands operands;
  bool is_factored;

  __device__ int first_column() const { return 64 * operands.warpgroup; }

  // Called by all warps of the block after g and s are loaded. Ends with a barrier.
  template <int Warps>
  __device__ void start() {
    const Tile s = operands.s, decayed_s = operands.decayed_s;
    is_factored = factor_gates<T, Warps, M>(
        operands.gates.g, operands.gates.decay, [&](int row, int col, float2 decay_to_end) {
          const float2 raw = load_lane_pair<T>(s, row, col),
                       exact = {raw.x * decay_to_end.x, raw.y * decay_to_end.y};
          const uint32_t rounded = pack_pair<T>(exact.x, exact.y);
          const float2 back = unpack_pair<T>(rounded);
          *reinterpret_cast<uint32_t*>(&lane_element(decayed_s, row, col)) = rounded;
          store_lane_pair<T>(s, row, col, exact.x - back.x, exact.y - back.y);
        });
    if (!is_factored) {
      if (operands.warpgroup == 0) operands.gates.split_into_subchunks();
      __syncthreads();
      if (operands.warpgroup == 0) end_by_subchunks(operands);
    }
    __syncthreads();
  }

  // With factors: computes W of key_write, rounded. y contains r.
  __device__ void key_write(AFragment<2> (&w)[2], const Tile& y) const {
    Scores W;
    zero(W);
#pragma unroll 2
    for (int m = 0; m < M; m += 16) {
      uint32_t weights[4];
      load_block(weights, operands.decayed_s, operands.gates.row(), m);
      add_scores<Side::later, T>(W, weights, y, m, operands.gates.warp);
    }
    round_scores<Side::later, true, T>(w, W, operands.gates.warp);
  }
  // With factors and u = x G: multiplies the rounding error of decayed_s by u in place, for dg.
  __device__ void store_rounding_error(const WarpgroupSums& u) const {
    for_each_register_pair<8>([&](int n, int i) {
      const int row = operands.gates.row() + 8 * i, col = first_column() + 8 * n;
      const float2 s = load_lane_pair<T>(operands.s, row, col);
      store_lane_pair<T>(operands.s, row, col, s.x * u.at[n][2 * i], s.y * u.at[n][2 * i + 1]);
    });
  }
  // With factors: adds the terms of the chunk's rows to u, without e^X.
  __device__ void value_write(WarpgroupSums& u, const AFragment<2> (&scores)[2], const Tile& y) const {
    add_score_product<Side::later, T>(u, scores, y, operands.gates.warp, first_column());
  }

  // Without factors: computes W, and u, which contains x G, becomes the result of value_write. Scales y in
  // place. Has barriers of the block.
  __device__ void write_by_subchunks(WarpgroupSums& u, AFragment<2> (&w)[2], const Scores& a,
                                     const Tile& y) const {
    Accumulator<N> all;
    fill(all, 0.f);
    for_each_register<N>(
        [&](int n, int i) { all.at[n][i] = n / 8 == operands.warpgroup ? u.at[n % 8][i] : 0.f; });
    Scores W;
    const Scores scores = a;
    decay_end_by_subchunks(operands, all);
    write_pairs(operands, y, all, W, scores);
    for_each_register<N>([&](int n, int i) {
      if (n / 8 == operands.warpgroup) u.at[n % 8][i] = all.at[n][i];
    });
    round_scores<Side::later, true, T>(w, W, operands.gates.warp);
  }

 private:
  // Not inlined: these functions are large and rarely called, and their registers would count for the fast
  // path.

  // decayed_s = s * e^{L_C - L_j}
  __device__ __noinline__ static void end_by_subchunks(const Operands operands) {
    Accumulator<N> weights;
    load_scaled_rows<T>(weights, operands.s, operands.gates.row());
    decay_end_by_subchunks(operands, weights);
    for_each_register_pair<N>([&](int n, int i) {
      store_lane_pair<T>(operands.decayed_s, operands.gates.row() + 8 * i, 8 * n, weights.at[n][2 * i],
                         weights.at[n][2 * i + 1]);
    });
  }

  // x *= e^{L_C - L_j}
  __device__ __noinline__ static void decay_end_by_subchunks(const Operands operands, Accumulator<N>& x) {
    Accumulator<N> after;
    operands.gates.decay_to_subchunk_end(after);
    multiply(x, after);
#pragma unroll 1
    for (int b = operands.gates.warp + 1; b < 4; ++b) {
      scale_columns(x, [&](int n) { return operands.gates.subchunk_decay(b, n); });
    }
  }

  // Computes W, and adds the terms of later rows to u.
  __device__ __noinline__ static void write_pairs(const Operands operands, const Tile y, Accumulator<N>& u,
                                                  Scores& W, const Scores& a) {
    const Gates<M>& gates = operands.gates;
    const int warp = gates.warp;
    zero(W);
    // The warp's own sub-chunk, one row t at a time.
    Accumulator<2> block;
    get_block(block, a, warp);
    operands.scratch.store(block);
    Accumulator<N> prefix_sum;
    gates.prefix_sum(prefix_sum);
#pragma unroll 1
    for (int t = 0; t < kSubchunk; ++t) {
      float2 score = operands.scratch.column(t);
      if (t <= lane_row()) score.x = 0.f;
      if (t <= lane_row() + 8) score.y = 0.f;
      const bool is_ordered[2] = {t >= lane_row(), t >= lane_row() + 8};
      __syncwarp();
      float upper_sum = 0.f, lower_sum = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float2 value = load_pair<T>(y, gates.row() + t, 8 * n + lane_col());
        const float2 l = gates.prefix_sum(t, n);
        value.x *= operands.y_scale, value.y *= operands.y_scale;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 w = operands.weight(i >> 1, n);
          const float decayed = (i & 1 ? value.y : value.x) *
                                decay_between(i & 1 ? l.y : l.x, prefix_sum.at[n][i], is_ordered[i >> 1]);
          u.at[n][i] += (i < 2 ? score.x : score.y) * decayed;
          (i < 2 ? upper_sum : lower_sum) += (i & 1 ? w.y : w.x) * decayed;
        }
      }
      operands.scratch.store_column(t, upper_sum, lower_sum);
      __syncwarp();
    }
    operands.scratch.load(block);
    set_block(W, block, warp);
    __syncthreads();
    gates.decay_from_subchunk_start(prefix_sum);
    scale_columns(prefix_sum, [&](int) { return float2{operands.y_scale, operands.y_scale}; });
    if (operands.warpgroup == 0) scale_rows<T>(y, gates.row(), prefix_sum);
    __syncthreads();
    // The later sub-chunks: W from the nearest to the last, u from the last to the nearest.
    Accumulator<N> after, x;
    gates.decay_to_subchunk_end(after);
    for_each_register<N>([&](int n, int i) {
      const float2 w = operands.weight(i >> 1, n);
      x.at[n][i] = (i & 1 ? w.y : w.x) * after.at[n][i];
    });
#pragma unroll 1
    for (int b = warp + 1; b < 4; ++b) {
      AFragment<N / 2> weights;
      round_to_a_fragment<T>(weights, x);
      fill(block, 0.f);
      add_product_transposed<T>(block, weights, y, kSubchunk * b);
      set_block(W, block, b);
      scale_columns(x, [&](int n) { return gates.subchunk_decay(b, n); });
    }
    fill(x, 0.f);
#pragma unroll 1
    for (int b = 3; b > warp; --b) {
      get_block(block, a, b);
      AFragment<1> scores;
      round_to_a_fragment<T>(scores, block);
      scale_columns(x, [&](int n) { return gates.subchunk_decay(b, n); });
      add_product<T>(x, scores, y, kSubchunk * b);
    }
    for_each_register<N>([&](int n, int i) { u.at[n][i] += x.at[n][i] * after.at[n][i]; });
  }
};

}  // namespace girih::kernels

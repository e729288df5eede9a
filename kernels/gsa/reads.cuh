// The two reads of the rows of a chunk through its gates:
//
//     value_read   y_i = e^{L_i} * (x_i H) + sum_{j<=i} a_ij e^{L_i - L_j} * s_j                  [M]
//     key_read     f_i = e^{L_i} * p_i,  W_ij = sum_m p_im s_jm e^{L_im - L_jm},  j <= i
//
// H [width, M] is the state before the chunk, a_ij are the scores of row i with row j, and L_i is the sum of
// g through row i for each slot. key_read computes f and W from p; the caller computes the read f H^T + W K
// (or V).
#pragma once

#include "gsa/chunk_gates.cuh"
#include "gsa/scores.cuh"

namespace girih::kernels {

// The reads of the rows of a warp, for `Columns` of M slots; all pointers start at the first of these. With
// `ExcludeSelf` value_read leaves out the term of the row's own token.
template <typename T, int M, bool ExcludeSelf = false, int Columns = M>
struct RowReads {
  static constexpr int N = Columns / 8;
  using Tile = SharedTile<T, kChunk, M>;

  // Tiles in shared memory.
  struct Operands {
    Gates<M, Columns> gates;
    Tile s;    // s~, the weights times e^{sum of g after the row to the end of the chunk}; without factors to
               // the end of the sub-chunk
    Tile raw;  // without factors: the weights, unscaled
    Scratch scratch;
  };
  Operands operands;
  bool is_factored;  // see chunk_gates.cuh

  // Called by all threads of the block after g and s are loaded; `Warps` warps share these columns. Ends with
  // a barrier.
  template <int Warps>
  __device__ void start() {
    const Tile s = operands.s;
    is_factored = factor_gates<T, Warps, Columns>(
        operands.gates.g, operands.gates.decay, [&](int row, int col, float2 decay_to_end) {
          const float2 old = load_lane_pair<T>(s, row, col);
          store_lane_pair<T>(s, row, col, old.x * decay_to_end.x, old.y * decay_to_end.y);
        });
    __syncthreads();
  }

  // r of row lane_row() + 8 i of the warp, columns 8n + lane_col() and the next; 1 without factors.
  __device__ float2 factor(int i, int n) const {
    const float2 r = operands.gates.factor(i, n);
    return {is_factored ? r.x : 1.f, is_factored ? r.y : 1.f};
  }

  // Without factors: prepares the reads; `raw`, the tile of operands.raw, has to be free. Called by all
  // threads of the block before the first read. Ends with a barrier.
  template <int Threads>
  __device__ void split_into_subchunks(const Tile& raw, const InputTensor<4>& weights,
                                       const InputTensor<4>& g, const TokenRange& range, int head,
                                       int slots) {
    if (is_factored) return;
    __syncthreads();
    load_weights<Threads>(raw, weights, g, range, head, slots);
    commit_copies();
    split_by_subchunks(operands);
    wait_copies<0>();
    __syncthreads();
  }

  // x *= e^{L_i}, without factors.
  __device__ void decay_from_start(Accumulator<N>& x) const {
    Accumulator<N> copy = x;  // the callee takes a reference, which keeps its argument in local memory
    decay_by_subchunks(operands, copy);
    x = copy;
  }

  // y contains x H and becomes the value read. a: the scores.
  __device__ void value_read(Accumulator<N>& y, const Scores& a) const {
    if (!is_factored) {
      Accumulator<N> copy = y;
      const Scores scores = a;
      value_read_by_subchunks(operands, copy, scores);
      y = copy;
      return;
    }
    scale_columns(y, [&](int n) { return operands.gates.chunk_decay(n); });
    AFragment<2> scores[2];
    round_scores<Side::earlier, !ExcludeSelf, T>(scores, a, operands.gates.warp);
    add_score_product<Side::earlier, T>(y, scores, operands.s, operands.gates.warp);
    operands.gates.multiply(y);
  }

  // p becomes f; W becomes the terms of these columns. `HasFactors`: p already contains r.
  template <bool HasFactors = false>
  __device__ void key_read(Accumulator<N>& p, Scores& W) const {
    if (!is_factored) {
      Accumulator<N> copy = p;
      Scores scores;
      key_read_by_subchunks(operands, copy, scores);
      p = copy;
      W = scores;
    } else {
      zero(W);
      if constexpr (!HasFactors) operands.gates.multiply(p);
#pragma unroll
      for (int k = 0; k < N / 2; ++k) {
        AFragment<1> x;
        round_to_a_fragment<T>(x, p, 2 * k);
        add_scores<Side::earlier, T>(W, x.at[0], operands.s, 16 * k, operands.gates.warp);
      }
      scale_columns(p, [&](int n) { return operands.gates.chunk_decay(n); });
    }
  }
  // The same with W of all columns, rounded.
  __device__ void key_read(Accumulator<N>& p, AFragment<2> (&w)[2]) const {
    Scores W;
    key_read(p, W);
    round_scores<Side::earlier, true, T>(w, W, operands.gates.warp);
  }

 private:
  // Not inlined: these functions are large and rarely called, and their registers would count for the fast
  // path.
  __device__ __noinline__ static void split_by_subchunks(const Operands operands) {
    operands.gates.split_into_subchunks();
    Accumulator<N> after;
    operands.gates.decay_to_subchunk_end(after);
    scale_rows<T>(operands.s, operands.gates.row(), after);
  }

  __device__ __noinline__ static void decay_by_subchunks(const Operands operands, Accumulator<N>& x) {
    Accumulator<N> prefix_sum;
    operands.gates.decay_from_subchunk_start(prefix_sum);
    multiply(x, prefix_sum);
#pragma unroll 1
    for (int b = 0; b < operands.gates.warp; ++b) {
      scale_columns(x, [&](int n) { return operands.gates.subchunk_decay(b, n); });
    }
  }

  __device__ __noinline__ static void value_read_by_subchunks(const Operands operands, Accumulator<N>& y,
                                                              const Scores& a) {
    const Gates<M, Columns>& gates = operands.gates;
    // y <- e^{l} (... ((x H) e^{total 0} + a_0 s_0) e^{total 1} + ...) + the terms of the row's own
    // sub-chunk, with l the prefix sum of the row
    Accumulator<2> block;
#pragma unroll 1
    for (int b = 0; b < gates.warp; ++b) {
      get_block(block, a, b);
      AFragment<1> scores;
      round_to_a_fragment<T>(scores, block);
      scale_columns(y, [&](int n) { return gates.subchunk_decay(b, n); });
      add_product<T>(y, scores, operands.s, kSubchunk * b);
    }
    get_block(block, a, gates.warp);
    operands.scratch.store(block);
    Accumulator<N> prefix_sum;
    gates.prefix_sum(prefix_sum);
    for_each_register<N>([&](int n, int i) { y.at[n][i] *= exp2_fast(prefix_sum.at[n][i]); });
#pragma unroll 1
    for (int j = 0; j < kSubchunk; ++j) {
      float2 score = operands.scratch.column(j);
      if (j + ExcludeSelf > lane_row()) score.x = 0.f;
      if (j + ExcludeSelf > lane_row() + 8) score.y = 0.f;
      const bool is_ordered[2] = {j <= lane_row(), j <= lane_row() + 8};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 weight = load_pair<T>(operands.raw, gates.row() + j, 8 * n + lane_col()),
                     l = gates.prefix_sum(j, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y.at[n][i] += (i < 2 ? score.x : score.y) * (i & 1 ? weight.y : weight.x) *
                        decay_between(prefix_sum.at[n][i], i & 1 ? l.y : l.x, is_ordered[i >> 1]);
        }
      }
    }
    __syncwarp();
  }

  __device__ __noinline__ static void key_read_by_subchunks(const Operands operands, Accumulator<N>& p,
                                                            Scores& W) {
    const Gates<M, Columns>& gates = operands.gates;
    zero(W);
    Accumulator<N> prefix_sum;
    gates.prefix_sum(prefix_sum);
#pragma unroll 1
    for (int j = 0; j < kSubchunk; ++j) {
      const bool is_ordered[2] = {j <= lane_row(), j <= lane_row() + 8};
      float upper_sum = 0.f, lower_sum = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float2 weight = load_pair<T>(operands.raw, gates.row() + j, 8 * n + lane_col()),
                     l = gates.prefix_sum(j, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          (i < 2 ? upper_sum : lower_sum) +=
              p.at[n][i] * (i & 1 ? weight.y : weight.x) *
              decay_between(prefix_sum.at[n][i], i & 1 ? l.y : l.x, is_ordered[i >> 1]);
        }
      }
      operands.scratch.store_column(j, upper_sum, lower_sum);
    }
    Accumulator<2> block;
    operands.scratch.load(block);
    set_block(W, block, gates.warp);
    // The earlier sub-chunks, from the nearest to the first; f is multiplied by the decay of one sub-chunk
    // after the other.
    for_each_register<N>([&](int n, int i) { p.at[n][i] *= exp2_fast(prefix_sum.at[n][i]); });
#pragma unroll 1
    for (int b = gates.warp - 1; b >= 0; --b) {
      AFragment<N / 2> x;
      round_to_a_fragment<T>(x, p);
      fill(block, 0.f);
      add_product_transposed<T>(block, x, operands.s, kSubchunk * b);
      set_block(W, block, b);
      scale_columns(p, [&](int n) { return gates.subchunk_decay(b, n); });
    }
  }
};

}  // namespace girih::kernels

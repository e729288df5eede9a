// Reads of a memory by a warp that has a tile of 16 tokens of the chunk.
//
// With E_ti = e^{L_t - L_i}, i <= t in the chunk, a read of a memory A and its transpose are
//     A_t w_t     = e^{L_t} (w_t A^T) - sum over i <= t of E_ti gamma_i (w_t.x_i) u_i       [M]
//     A_t^T l_t   = e^{L_t} (l_t A)   - sum over i <= t of E_ti gamma_i (l_t.u_i) x_i       [X]
#pragma once

#include "pipe/row_source.h"
#include "trellis/common.cuh"

namespace girih::kernels {

// L of the lane's rows, lane_row() and lane_row() + 8.
struct TrellisLogDecays {
  float2 sum, log_decay_error;
  __device__ explicit TrellisLogDecays(const TokenGate* own)
      : sum{own[lane_row()].log_decay, own[lane_row() + 8].log_decay},
        log_decay_error{own[lane_row()].log_decay_error, own[lane_row() + 8].log_decay_error} {}
};

// s_ti *= -E_ti gamma_i, with t in the warp's tile and i in an earlier tile. `own`: i is in the same tile;
// s_ti = 0 for i > t.
__device__ inline void apply_token_decay(Accumulator<2>& s, const TrellisLogDecays& L,
                                         const TokenGate* tokens, bool is_diagonal) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = 8 * n + lane_col() + i;
      const TokenGate of = tokens[col];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float log_decay_between =
            (half ? L.sum.y : L.sum.x) - of.log_decay +
            ((half ? L.log_decay_error.y : L.log_decay_error.x) - of.log_decay_error);
        float& x = s.at[n][2 * half + i];
        x = !is_diagonal || col <= lane_row() + 8 * half ? x * -of.gamma * exp2_fast(log_decay_between) : 0.f;
      }
    }
  }
}
// s_it *= E_ti, with i in the warp's tile and t in a later tile of `count` tokens. `own`: t is in the same
// tile; s_it = 0 for i > t.
__device__ inline void apply_token_decay_transposed(Accumulator<2>& s, const TrellisLogDecays& L,
                                                    const TokenGate* tokens, bool is_diagonal, int count) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = 8 * n + lane_col() + i;
      const TokenGate of = tokens[col];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float log_decay_between =
            of.log_decay - (half ? L.sum.y : L.sum.x) +
            (of.log_decay_error - (half ? L.log_decay_error.y : L.log_decay_error.x));
        float& x = s.at[n][2 * half + i];
        x = col < count && (!is_diagonal || lane_row() + 8 * half <= col) ? x * exp2_fast(log_decay_between)
                                                                          : 0.f;
      }
    }
  }
}

// sums += weigh(a x^T) y
template <typename T, int N, int K, class Tile, class Weigh>
__device__ inline void add_masked_product(Accumulator<N>& sums, const AFragment<K>& a, const Tile& x,
                                          const Tile& y, const Weigh& apply_mask) {
  Accumulator<2> scores;
  fill(scores, 0.f);
  add_product_transposed<T>(scores, a, x);
  apply_mask(scores);
  AFragment<1> masked_scores;
  round_to_a_fragment<T>(masked_scores, scores);
  add_product<T>(sums, masked_scores, y);
}

// The terms of the chunk's tokens in a read, and the decay of the memory's term. For tile j <= `tile`, xs(j)
// and ys(j) are the two vectors of the tokens and gates(j) their gates.
template <typename T, int N, int K, class Xs, class Ys, class Gates>
__device__ inline void add_intra_chunk(Accumulator<N>& y, const AFragment<K>& w, int tile, const Xs& xs,
                                       const Ys& ys, const Gates& gates) {
  const TrellisLogDecays L(gates(tile));
  scale_rows(y, {exp2_fast(L.sum.x), exp2_fast(L.sum.y)});
  for (int j = 0; j <= tile; ++j) {
    add_masked_product<T>(y, w, xs(j), ys(j),
                          [&](Accumulator<2>& s) { apply_token_decay(s, L, gates(j), j == tile); });
  }
}

}  // namespace girih::kernels

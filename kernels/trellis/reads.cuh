// Reads of a memory by a warp that has a tile of 16 tokens of the chunk.
//
// A is the memory before the chunk, and E_ti = e^{L_t - L_i} for i <= t in the chunk. The two reads of the
// memory after token t are
//
//     A_t w_t     = e^{L_t} A w_t     - sum over i <= t of E_ti gamma_i (w_t.x_i) u_i       [M]
//     A_t^T l_t   = e^{L_t} A^T l_t   - sum over i <= t of E_ti gamma_i (l_t.u_i) x_i       [X]
#pragma once

#include "pipe/row_source.h"
#include "trellis/common.cuh"

namespace girih::kernels {

// L of the lane's rows, lane_row() and lane_row() + 8.
struct TrellisLogDecays {
  float2 log_decay, log_decay_error;
  __device__ explicit TrellisLogDecays(const TokenGate* gates)
      : log_decay{gates[lane_row()].log_decay, gates[lane_row() + 8].log_decay},
        log_decay_error{gates[lane_row()].log_decay_error, gates[lane_row() + 8].log_decay_error} {}
};

// s_ti *= -E_ti gamma_i, with t in the warp's tile and i in the tile of `gates`. `is_diagonal`: both are the
// same tile, and s_ti = 0 for i > t. The error terms enter the difference L_t - L_i, which may be small.
__device__ inline void apply_token_decay(Accumulator<2>& s, const TrellisLogDecays& L, const TokenGate* gates,
                                         bool is_diagonal) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = 8 * n + lane_col() + i;
      const TokenGate gate = gates[col];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float log_decay_between =
            (half ? L.log_decay.y : L.log_decay.x) - gate.log_decay +
            ((half ? L.log_decay_error.y : L.log_decay_error.x) - gate.log_decay_error);
        float& x = s.at[n][2 * half + i];
        x = !is_diagonal || col <= lane_row() + 8 * half ? x * -gate.gamma * exp2_fast(log_decay_between)
                                                         : 0.f;
      }
    }
  }
}
// s_it *= E_ti, with i in the warp's tile and t in the tile of `gates`, which has `count` tokens.
// `is_diagonal`: both are the same tile, and s_it = 0 for i > t.
__device__ inline void apply_token_decay_transposed(Accumulator<2>& s, const TrellisLogDecays& L,
                                                    const TokenGate* gates, bool is_diagonal, int count) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = 8 * n + lane_col() + i;
      const TokenGate gate = gates[col];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float log_decay_between =
            gate.log_decay - (half ? L.log_decay.y : L.log_decay.x) +
            (gate.log_decay_error - (half ? L.log_decay_error.y : L.log_decay_error.x));
        float& x = s.at[n][2 * half + i];
        x = col < count && (!is_diagonal || lane_row() + 8 * half <= col) ? x * exp2_fast(log_decay_between)
                                                                          : 0.f;
      }
    }
  }
}

// sums += mask(a x^T) y, where apply_mask modifies the scores a x^T.
template <typename T, int N, int K, class Tile, class Mask>
__device__ inline void add_masked_product(Accumulator<N>& sums, const AFragment<K>& a, const Tile& x,
                                          const Tile& y, const Mask& apply_mask) {
  Accumulator<2> scores;
  fill(scores, 0.f);
  add_product_transposed<T>(scores, a, x);
  apply_mask(scores);
  AFragment<1> masked_scores;
  round_to_a_fragment<T>(masked_scores, scores);
  add_product<T>(sums, masked_scores, y);
}

// Completes a read of which y has the product with the memory, for the tokens t of tile `tile` of the chunk:
//
//     y_t <- e^{L_t} y_t - sum over i <= t of E_ti gamma_i (w_t.dot_i) sum_i
//
// For tiles j <= `tile`, dot_tiles(j) and sum_tiles(j) are the rows dot_i and sum_i, gates(j) the gates.
template <typename T, int N, int K, class DotTiles, class SumTiles, class Gates>
__device__ inline void decay_and_add_intra_chunk(Accumulator<N>& y, const AFragment<K>& w, int tile,
                                                 const DotTiles& dot_tiles, const SumTiles& sum_tiles,
                                                 const Gates& gates) {
  const TrellisLogDecays L(gates(tile));
  scale_rows(y, {exp2_fast(L.log_decay.x), exp2_fast(L.log_decay.y)});
  for (int j = 0; j <= tile; ++j) {
    add_masked_product<T>(y, w, dot_tiles(j), sum_tiles(j),
                          [&](Accumulator<2>& s) { apply_token_decay(s, L, gates(j), j == tile); });
  }
}

}  // namespace girih::kernels

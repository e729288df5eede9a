// Reads of a memory by a warp that has a tile of 16 tokens of the chunk.
//
// With E_ti = e^{L_t - L_i}, i <= t in the chunk, a read of a memory A and its transpose are
//     A_t w_t     = e^{L_t} (w_t A^T) - sum over i <= t of E_ti gamma_i (w_t.x_i) u_i       [M]
//     A_t^T l_t   = e^{L_t} (l_t A)   - sum over i <= t of E_ti gamma_i (l_t.u_i) x_i       [X]
#pragma once

#include "pipe/row_source.h"
#include "trellis/memory.cuh"

namespace girih::kernels {

// L of the lane's rows, lane_row() and lane_row() + 8.
struct Through {
  float2 sum, lost;
  __device__ explicit Through(const TokenGate* own)
      : sum{own[lane_row()].through, own[lane_row() + 8].through},
        lost{own[lane_row()].lost, own[lane_row() + 8].lost} {}
};

// s_ti *= -E_ti gamma_i, with t in the warp's tile and i in an earlier tile. `own`: i is in the same tile;
// s_ti = 0 for i > t.
__device__ inline void weigh_earlier(Sums<2>& s, const Through& L, const TokenGate* tokens, bool own) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = 8 * n + lane_col() + i;
      const TokenGate of = tokens[col];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float between =
            (half ? L.sum.y : L.sum.x) - of.through + ((half ? L.lost.y : L.lost.x) - of.lost);
        float& x = s.at[n][2 * half + i];
        x = !own || col <= lane_row() + 8 * half ? x * -of.gamma * exp2_fast(between) : 0.f;
      }
    }
  }
}
// s_it *= E_ti, with i in the warp's tile and t in a later tile of `count` tokens. `own`: t is in the same
// tile; s_it = 0 for i > t.
__device__ inline void weigh_later(Sums<2>& s, const Through& L, const TokenGate* tokens, bool own,
                                   int count) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = 8 * n + lane_col() + i;
      const TokenGate of = tokens[col];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float between =
            of.through - (half ? L.sum.y : L.sum.x) + (of.lost - (half ? L.lost.y : L.lost.x));
        float& x = s.at[n][2 * half + i];
        x = col < count && (!own || lane_row() + 8 * half <= col) ? x * exp2_fast(between) : 0.f;
      }
    }
  }
}

// sums += weigh(a x^T) y
template <typename T, int N, int K, class Tile, class Weigh>
__device__ inline void add_scored(Sums<N>& sums, const Operand<K>& a, const Tile& x, const Tile& y,
                                  const Weigh& weigh) {
  Sums<2> scores;
  fill(scores, 0.f);
  add_product_transposed<T>(scores, a, x);
  weigh(scores);
  Operand<1> weighed;
  round_to<T>(weighed, scores);
  add_product<T>(sums, weighed, y);
}

// The terms of the chunk's tokens in a read, and the decay of the memory's term. For tile j <= `tile`, xs(j)
// and ys(j) are the two vectors of the tokens and gates(j) their gates.
template <typename T, int N, int K, class Xs, class Ys, class Gates>
__device__ inline void finish_read(Sums<N>& y, const Operand<K>& w, int tile, const Xs& xs, const Ys& ys,
                                   const Gates& gates) {
  const Through L(gates(tile));
  scale_rows(y, {exp2_fast(L.sum.x), exp2_fast(L.sum.y)});
  for (int j = 0; j <= tile; ++j) {
    add_scored<T>(y, w, xs(j), ys(j), [&](Sums<2>& s) { weigh_earlier(s, L, gates(j), j == tile); });
  }
}

}  // namespace girih::kernels

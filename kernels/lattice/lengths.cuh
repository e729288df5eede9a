// The lengths by which reads divide, for 16 vectors (rows) and the 16 tokens of a chunk (columns), in the
// registers of one warp.
#pragma once

#include "lattice/tokens.cuh"

namespace girih::kernels::lattice {

// Computes sigma^T, n^T and r^T, from which the floor of n follows (intra_chunk.cuh), without the terms of
// Delta of a resumed chunk. `squares`: |h|^2 of the lane's columns.
__device__ inline void compute_lengths(Accumulator<2>& sigma, Accumulator<2>& r, Accumulator<2>& n,
                                       const Accumulator<2>& W, const Accumulator<2>& a,
                                       const Accumulator<2>& N, const Triangles& triangles,
                                       const float2 (&squares)[2]) {
  Accumulator<2> x = W;
  multiply(x, a);
  fill(sigma, 0.f);
  add_triangle_product(sigma, x, triangles.decay);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const float2 h2 = squares[b];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float w = W.at[b][i], Wa = x.at[b][i], own = w * w * (i & 1 ? h2.y : h2.x);
      r.at[b][i] = own;
      x.at[b][i] = own - Wa * Wa + 2.f * w * (N.at[b][i] - a.at[b][i] * (sigma.at[b][i] - Wa));
    }
  }
  // The floor needs little accuracy: one bf16 part is enough.
  uint32_t rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rounded[i] = pack_pair<__nv_bfloat16>(r.at[i / 2][i % 2 * 2], r.at[i / 2][i % 2 * 2 + 1]);
  }
  fill(r, 0.f);
  fill(n, 0.f);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    mma<__nv_bfloat16>(r.at[b], rounded, triangles.square.hi[b][0], triangles.square.hi[b][1]);
  }
  add_triangle_product(n, x, triangles.square);
}

}  // namespace girih::kernels::lattice

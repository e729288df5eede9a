// Lattice in fp32 on the CUDA cores, token by token: all products, sums and memories are fp32, without tf32.
// For fp32 inputs, chunks of fewer than 8 tokens, and the variants of chunks of one token: without
// normalisation, and with shrinkage.
//
// As in lattice.h, for a token t of a chunk that starts with S: phi = S and l = 1; without normalisation l_i
// = |s_i| and phi_i = s_i / l_i:
//
//     decode      h = phi k - v,  c = k
//     encode      h = v,          c = phi^T v - k
//     similarity  h = v,          c = k
//
//     a = phi^T h                                                                        [M]
//     W = -gamma c / l            + for similarity                                       [M]
//     Delta_t = e^{g_t} Delta_{t-1} + (h - phi * a) * W                                  [D, M]
//     x = m S + Delta_t           m = e^{max(L_t, -30)}
//     x <- soft(x, gamma lambda)                                                         [D, M]
//     y = x / |x|                 without normalisation y = x; a column of zeros: y = s
//     o = y q                                                                            [D]
//     S <- y, Delta <- 0, L <- 0  at the end of a chunk
//
// No sums are formed that later cancel, so no floor is needed, unlike for n of the chunk form. A block has a
// sequence and head and holds S and Delta in registers for all tokens.
//
// Backward goes from the last token to the first. dS is the gradient of the chunk's S, at the end of a chunk
// that of the next chunk's S. dDelta is the gradient of Delta_t:
//
//     dy = sum of do q^T, plus dS at the end of a chunk, where dS starts from 0 again
//     dx = (dy - y (y.dy)) / |x|                           without normalisation dy; 0 where x shrank to 0
//     dDelta <- dDelta + dx       dS <- dS + m dx          dL <- dL + m dx.S
//     dW = (dDelta^T h - a (dDelta.phi)) / l    da = -(dDelta.phi) W + the term of c     [M]
//     dh = dDelta W + phi da                                                          [D]
//     dphi = -dDelta * (W a) + h da^T + dh k^T             last term: decode only        [D, M]
//     dS <- dS + dphi             without normalisation through phi_i = s_i / l_i
//     dg = dL + e^{g_t} dDelta.Delta_{t-1}                 dDelta <- e^{g_t} dDelta
//
// This needs y and S of every token. Forward stores S before every segment of whole chunks, at most 64
// tokens. Backward recomputes y, h, a and 1 / |x| of a segment's tokens in a workspace.
// tokens; backward makes y, h, a and 1 / |x| of a segment's tokens once more, in a workspace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lattice/lattice.h"
#include "time/chunks.h"

namespace girih::kernels {

constexpr int kLatticeSegment = 64;  // tokens, at most

struct LatticeExactShape {
  Tokens tokens;
  const int64_t* position;  // see ChunkGrid
  int chunk;                // 1..kMostChunk
  int heads, query_heads;   // H, and HQ, a multiple of H
  int D, M;                 // up to kLatticeWidest
  LatticeObjective objective;
  bool normalize;   // without it, and with shrinkage, chunks have one token
  float shrinkage;  // lambda
};

// Segments are whole chunks.
__host__ __device__ inline int lattice_segment(int chunk) { return kLatticeSegment / chunk * chunk; }
__host__ __device__ inline ChunkGrid lattice_segments(const LatticeExactShape& shape) {
  return {shape.tokens, lattice_segment(shape.chunk), shape.position};
}
// Columns of stored memories: M rounded up to packs of 16 bytes.
__host__ __device__ inline int lattice_kept_columns(const LatticeExactShape& shape) {
  return (shape.M + 3) / 4 * 4;
}

// Any strides and types. Without positions, `step` and `decay` of the start are not used.
struct LatticeExactInputs {
  LatticeExactShape shape;
  In<4> q, k, v;   // [B, T, HQ, M], [B, T, H, M], [B, T, H, D]
  In<3> gamma, g;  // [B, T, H], g optional
  LatticeStart start;
};

struct LatticeExactScan {
  LatticeExactInputs of;
  LatticeEnd end;
  int64_t* last_position;  // [N]
  float* memories;         // [segments, H, D, M padded to packs]: S before every segment, optional
  Out<4> o;                // [B, T, HQ, D]
};
cudaError_t lattice_exact_scan(const LatticeExactScan& problem, cudaStream_t stream);

struct LatticeExactGradients {
  LatticeExactInputs of;
  const float* memories;
  In<4> dout;               // [B, T, HQ, D]; absent: zero
  In<4> dlast, dlast_step;  // [N, H, D, M]; absent: zero
  In<2> dlast_decay;        // [N, H]; absent: zero
  Out<4> dq, dk, dv;        // shapes of q, k, v
  Out<3> dgamma, dg;        // [B, T, H], dg optional
  // [N, H, D, M]; with normalisation dmemory is tangent; dstep is present if there are positions
  Out<4> dmemory, dstep;
  Out<2> ddecay;     // [N, H], present if there are positions and g
  float* workspace;  // lattice_exact_workspace() floats
};
cudaError_t lattice_exact_workspace(const LatticeExactShape& shape, int64_t& floats);
cudaError_t lattice_exact_gradients(const LatticeExactGradients& problem, cudaStream_t stream);

// Whether the current device has enough shared memory for forward and backward.
cudaError_t lattice_exact_fits(const LatticeExactShape& shape, bool& fits);

}  // namespace girih::kernels

// Lattice on the plain fp32 cores, token by token: every product, sum and memory in fp32, no tf32. What the
// tensor-core kernels leave over: fp32 inputs, chunks of fewer than 8 tokens, and of chunks of one token a
// norm that goes free and a shrinkage.
//
// As in lattice.h, of a token t of a chunk that began with S, phi = S and l = 1; where the norm goes free
// l_i = |s_i| and phi_i = s_i / l_i:
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
//     y = x / |x|                 x where the norm goes free; of a column of zeros s: it keeps its old value
//     o = y q                                                                            [D]
//     S <- y, Delta <- 0, L <- 0  where the chunk ends
//
// Nothing is added up that a chunk form would take apart again: no floor, as `n` of the chunk form has, is
// needed. A block has a sequence's head and keeps S and Delta in registers from the first token to the last.
//
// Backward walks from the last token to the first, with dS the gradient of the chunk's S, and where a chunk
// ends of the next one's, and dDelta that of Delta_t:
//
//     dy = sum of do q^T, and dS where the chunk ends, which begins again at 0
//     dx = (dy - y (y.dy)) / |x|                           dy where the norm goes free; 0 where x shrank to 0
//     dDelta <- dDelta + dx       dS <- dS + m dx          dL <- dL + m dx.S
//     dW = (dDelta^T h - a (dDelta.phi)) / l    da = -(dDelta.phi) W + what c gives      [M]
//     dh = dDelta W + phi da                                                          [D]
//     dphi = -dDelta * (W a) + h da^T + dh k^T             the last of decode            [D, M]
//     dS <- dS + dphi             through phi_i = s_i / l_i where the norm goes free
//     dg = dL + e^{g_t} dDelta.Delta_{t-1}                 dDelta <- e^{g_t} dDelta
//
// which needs y and S of every token. Forward keeps S before every segment of whole chunks of about 64
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
  const int64_t* position;  // as of ChunkGrid
  int chunk;                // 1..kMostChunk
  int heads, query_heads;   // H, and HQ, a multiple
  int D, M;                 // up to kLatticeWidest
  LatticeObjective objective;
  bool normalize;   // else, and with a shrinkage, a chunk is one token
  float shrinkage;  // lambda
};

// Segments are chunks of chunks: they begin and end where chunks do.
__host__ __device__ inline int lattice_segment(int chunk) { return kLatticeSegment / chunk * chunk; }
__host__ __device__ inline ChunkGrid lattice_segments(const LatticeExactShape& shape) {
  return {shape.tokens, lattice_segment(shape.chunk), shape.position};
}
// The columns of the memories that are kept, in packs of 16 bytes.
__host__ __device__ inline int lattice_kept_columns(const LatticeExactShape& shape) {
  return (shape.M + 3) / 4 * 4;
}

// Of any strides and types. Without positions `step` and `decay` of the start are not looked at.
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
  float* memories;         // [segments, H, D, M in packs]: S before every segment, optional
  Out<4> o;                // [B, T, HQ, D]
};
cudaError_t lattice_exact_scan(const LatticeExactScan& problem, cudaStream_t stream);

struct LatticeExactGradients {
  LatticeExactInputs of;
  const float* memories;
  In<4> dout;               // [B, T, HQ, D], optional: zero
  In<4> dlast, dlast_step;  // [N, H, D, M], optional: zero
  In<2> dlast_decay;        // [N, H], optional: zero
  Out<4> dq, dk, dv;        // as q, k, v
  Out<3> dgamma, dg;        // [B, T, H], dg optional
  Out<4> dmemory, dstep;    // [N, H, D, M]; of unit columns dmemory is tangent; dstep there with positions
  Out<2> ddecay;            // [N, H], there with positions and g
  float* workspace;         // of lattice_exact_workspace() floats
};
cudaError_t lattice_exact_workspace(const LatticeExactShape& shape, int64_t& floats);
cudaError_t lattice_exact_gradients(const LatticeExactGradients& problem, cudaStream_t stream);

// Whether the current device has the shared memory for both.
cudaError_t lattice_exact_fits(const LatticeExactShape& shape, bool& fits);

}  // namespace girih::kernels

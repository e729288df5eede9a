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
#pragma once

#include "lattice/lattice.h"

namespace girih::kernels::lattice {

// Whether `limit` bytes of shared memory suffice for forward.
cudaError_t fp32_scan_fits(const LatticeFp32Shape& shape, int limit, bool& fits);

}  // namespace girih::kernels::lattice

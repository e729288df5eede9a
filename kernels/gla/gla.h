// Gated linear attention.
//
//     S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T          [D, V]
//     o_t = scale * S_t^T q_t                          [V]
//
// It is the second memory of gsa alone, with q in p's and k in s's place: its scan is gsa's with that one
// memory, and these are the kernels of single chunks. In the words of GsaShape M is D here, and D is 0.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

struct GlaOutput {
  GsaShape shape;
  In<4> q, k, v;       // [B, T, HQ, M], [B, T, H, M], [B, T, H, V]
  In<4> g;             // [B, T, H, M] fp32
  const void* states;  // of the scan of v
  Out<4> o;            // [B, T, HQ, V]
};

cudaError_t gla_output(const GlaOutput& problem, cudaStream_t stream);

// What the gradient needs of every query row, and dq.
struct GlaRows {
  GsaShape shape;
  In<4> q, k, v, g;
  const void* states;
  In<4> dout;     // [B, T, HQ, V]
  Out<4> dq;      // [B, T, HQ, M]
  Out<4> q_scan;  // [B, T, HQ, M]: scale * q as the reverse scan takes it
  Out<4> w;       // [B, T, HQ, M] fp32: q * its gradient, without what a row reads of its own token
};

cudaError_t gla_rows(const GlaRows& problem, cudaStream_t stream);

// The other gradients, from the reverse scan of (do, q). As in GsaColumns the query heads of one memory each
// give their part.
struct GlaColumns {
  GsaShape shape;
  In<4> q, k, v, g, dout, w;
  const void* states;     // of the forward scan
  const void* gradients;  // of the reverse scan
  In<4> initial,
      start;      // before a sequence's first token: the state, optional, and its gradient, [N, H, V, M] fp32
  Out<4> dk, dv;  // [B, T, HQ, M], [B, T, HQ, V], dtype or fp32
  Out<4> dg;      // [B, T, HQ, M] fp32
};

cudaError_t gla_columns(const GlaColumns& problem, cudaStream_t stream);

}  // namespace girih::kernels

// Gated linear attention (GLA) with a gate for each key channel, and a step for all kinds of gates. head.h
// has the kernels for a gate for each head, or no gate.
//
//     S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T          [D, V]
//     o_t = scale * S_t^T q_t                          [V]
//
// This is the second memory of gsa alone, with q in place of p and k in place of s. The scan is gsa's with
// this one memory; the kernels below process single chunks. Reuses GsaShape with M = D and D = 0.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

struct GlaOutput {
  GsaShape shape;
  In<4> q, k, v;       // [B, T, HQ, M], [B, T, H, M], [B, T, H, V]
  In<4> g;             // [B, T, H, M] fp32
  const void* states;  // from the scan of v
  Out<4> o;            // [B, T, HQ, V]
};

cudaError_t gla_output(const GlaOutput& problem, cudaStream_t stream);

struct GlaRows {
  GsaShape shape;
  In<4> q, k, v, g;
  const void* states;
  In<4> dout;         // [B, T, HQ, V]
  Out<4> dq;          // [B, T, HQ, M]
  RowGradients left;  // with y = scale * q
  Out<4> q_scan;      // y_scan of RowGradients, [B, T, HQ, M]
};

cudaError_t gla_rows(const GlaRows& problem, cudaStream_t stream);

// s is k; the memory is memory[1] with (x, read, y) = (v, do, q).
cudaError_t gla_columns(const GatedColumns& problem, cudaStream_t stream);

// One token. Any kind of gate, any sizes whose vectors fit in shared memory, any strides, any types except
// fp64. The state is updated in place.
struct GlaStep {
  int64_t sequences;
  int heads, query_heads, key_share, query_share;  // as in HeadShape
  int D, V;
  float scale;
  In<3> q, k, v;  // [N, HQ, D], [N, HK, D], [N, H, V]
  In<3> g;        // [N, H, D], optional
  Out<4> state;   // [N, H, D, V] fp32
  Out<3> o;       // [N, HO, V]
};

cudaError_t gla_step(const GlaStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

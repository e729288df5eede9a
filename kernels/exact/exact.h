// gsa and gla on the plain fp32 cores: every product, sum and state in fp32, no tf32, any D, V and M. What
// the tensor-core kernels leave over: fp32 inputs, more slots or wider rows than they have, and abc, whose
// gradients cancel to less than 16-bit products keep.
//
// With the chunk's rows i, j in the order of time, L_i the sums of gates through row i and H the state before
// the chunk, everything is two reads:
//
//     value_read   y_i = e^{L_i} * (x_i H) + sum_{j<=i} (x_i . y_j) e^{L_i - L_j} * s_j                  [M]
//     key_read     r_i = (e^{L_i} * p_i) H^T + sum_{j<=i} (sum_m p_im s_jm e^{L_im - L_jm}) y_j          [X]
//
// gsa     z = value_read(q, k, s, Hk)      p = feature(scale z)      o = key_read(p, s, v, Hv)
//         dp = value_read(do, v, s, Hv)    dz = feature'(z, dp)      dq = key_read(dz, s, k, Hk)
// gla     o = key_read(scale q, k, v, S)                             dq = scale value_read(do, v, k, S)
//
// and, in reversed time, with G the gradient of the state after the chunk in H's place, those of the writers:
//
// gsa     dk = key_read(s, dz, q, Gk)      dv = key_read(s, p, do, Gv)
//         ds = value_read(k, q, dz, Gk) + value_read(v, do, p, Gv)
// gla     dv = key_read(k, scale q, do, G)                           dk = value_read(v, do, scale q, G)
//
// The states come from gated_scan (DType::f32). Rows start at 16 bytes and are multiples of 4 elements wide;
// arrays are fp32, fp16 or bf16, each as its own In says, unless fp32 is named.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

// Who reads and who writes. Forward the query heads read what their memory head's tokens wrote, in reversed
// time a memory head reads what all its query heads wrote.
struct ExactShape {
  Tokens tokens;
  int heads, query_heads;
  int M;
  bool reverse;
  In<4> g;              // [B, T, heads, M] fp32
  const float* states;  // [piece_count(tokens, 64), heads, rows, M]
  int rows;
};

struct ValueRead {
  ExactShape shape;
  struct Term {
    In<4> x;            // [B, T, readers, width]
    In<4> y;            // [B, T, writers, width]
    In<4> s;            // [B, T, writers, M]
    int first_row = 0;  // of the states
    int width = 0;      // 0: no such term
  } term[2];            // added
  Out<4> out;           // [B, T, readers, M] fp32
};

cudaError_t exact_value_read(const ValueRead& problem, cudaStream_t stream);

struct KeyRead {
  ExactShape shape;
  In<4> p;        // [B, T, readers, M]
  In<4> s;        // [B, T, writers, M]
  In<4> y;        // [B, T, writers, width]
  int first_row;  // of the states
  int width;
  Out<4> out;  // [B, T, readers, width]
};

cudaError_t exact_key_read(const KeyRead& problem, cudaStream_t stream);

// gated_scan of DType::f32.
int64_t exact_scan_workspace(const GatedScan& problem);
cudaError_t exact_scan(const GatedScan& problem, cudaStream_t stream);

// z [rows, M] becomes p = feature(scale z); with dp also its gradient.
struct ExactFeature {
  int64_t rows;
  int M, slots;  // slots of M exist: p of the others is zero, whatever their z
  Feature feature;
  float scale;
  float* z;   // [rows, M]
  float* dp;  // [rows, M], optional: becomes dz, scale * the gradient of the logits
  float* w;   // [rows, M], with dp: logits * their gradient + p * dp
};

cudaError_t exact_feature(const ExactFeature& problem, cudaStream_t stream);

// The gradient of the gates from what both scans published; where s is 1 - e^g, with what comes through s.
struct ExactGateGradient {
  Tokens tokens;
  int heads, query_heads, M;
  In<4> w;                          // [B, T, query_heads, M] fp32: reads * their gradients
  In<4> s;                          // [B, T, heads, M] fp32
  In<4> ds;                         // [B, T, heads, M] fp32
  In<4> g;                          // [B, T, heads, M] fp32: s is 1 - e^g; absent: s is not made of g
  const float *states, *gradients;  // of the scans
  int width[2];                     // a memory's rows
  // Of sequences, [N, heads, width, M] fp32: the last state, and the gradient of the first.
  In<4> final[2], start[2];
  Out<4> dg;  // [B, T, heads, M] fp32
};

cudaError_t exact_gate_gradient(const ExactGateGradient& problem, cudaStream_t stream);

// ABC's slot weights and gates from its logits a_t:
//     z_t = log(e^{z_{t-1}} + e^{a_t})       s_t = e^{a_t - z_t}       g_t = z_{t-1} - z_t
// A logit of -inf is a masked token: s = g = 0. With an empty z (-inf) the first token has s = 1, g = 0.
struct AbcGates {
  Tokens tokens;
  int heads, M;
  In<4> logits;     // [B, T, heads, M] fp32, any strides
  In<3> initial;    // z_0 [N, heads, M] fp32, optional: empty
  Out<4> s, g;      // [B, T, heads, M] fp32
  Out<3> final;     // [N, heads, M] fp32
  void* workspace;  // abc_workspace() bytes
};

// The gradient of the logits and of z_0. Z_t, what z_t gets from later tokens, goes back in time:
//     da_t = s_t (Z_t + e^{g_t} ds_t - dg_t)       Z_{t-1} = e^{g_t} Z_t - s_t (e^{g_t} ds_t - dg_t)
struct AbcGradient {
  Tokens tokens;
  int heads, M;
  In<4> s, g, ds, dg;  // [B, T, heads, M] fp32
  In<3> final;         // of the last z, [N, heads, M] fp32, optional
  In<3> initial;       // z_0, optional
  Out<4> dlogits;      // [B, T, heads, M] fp32
  Out<3> dinitial;     // [N, heads, M] fp32, with initial
  void* workspace;
};

int64_t abc_workspace(const Tokens& tokens, int heads, int M);
cudaError_t abc_gates(const AbcGates& problem, cudaStream_t stream);
cudaError_t abc_gradient(const AbcGradient& problem, cudaStream_t stream);

}  // namespace girih::kernels

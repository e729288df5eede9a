// gsa, gla and the gates of ABC in fp32 on the CUDA cores: all products, sums and states are fp32, for any D,
// V and M. These kernels serve calls that the tensor-core kernels do not: fp32 inputs, more slots or wider
// rows, and ABC, whose gradients cancel to less than the precision of 16-bit products.
//
// Rows i, j of a chunk are in the order of time, L_i is the sum of gates through row i, and H is the state
// before the chunk. Two kernels compute all results:
//
//     value_read   y_i = e^{L_i} * (x_i H) + sum_{j<=i} (x_i . y_j) e^{L_i - L_j} * s_j                  [M]
//     key_read     r_i = (e^{L_i} * p_i) H^T + sum_{j<=i} (sum_m p_im s_jm e^{L_im - L_jm}) y_j          [X]
//
// gsa     z = value_read(q, k, s, Hk)      p = feature(scale z)      o = key_read(p, s, v, Hv)
//         dp = value_read(do, v, s, Hv)    dz = feature'(z, dp)      dq = key_read(dz, s, k, Hk)
// gla     o = key_read(scale q, k, v, S)                             dq = scale value_read(do, v, k, S)
//
// The gradients of the writers use the same kernels in reversed time, with G, the gradient of the state after
// the chunk, in place of H:
//
// gsa     dk = key_read(s, dz, q, Gk)      dv = key_read(s, p, do, Gv)
//         ds = value_read(k, q, dz, Gk) + value_read(v, do, p, Gv)
// gla     dv = key_read(k, scale q, do, G)                           dk = value_read(v, do, scale q, G)
//
// fp32_scan computes the states. Rows start at multiples of 16 bytes and have a multiple of 4 elements.
// Tensors without a type in their comment are fp32, fp16 or bf16.
#pragma once

#include "gsa/kernels.h"

namespace girih::kernels {

// The shape of a read. Forward, a query head reads what its memory head wrote. In reversed time, a memory
// head reads what all its query heads wrote.
struct Fp32ReadShape {
  SequenceLayout tokens;
  int heads, query_heads;
  int M;
  bool reverse;
  InputTensor<4> g;     // [B, T, heads, M] fp32
  const float* states;  // [token_range_count(tokens, 64), heads, rows, M]
  int rows;
};

struct ValueRead {
  Fp32ReadShape shape;
  struct Term {
    InputTensor<4> x;   // [B, T, readers, width]
    InputTensor<4> y;   // [B, T, writers, width]
    InputTensor<4> s;   // [B, T, writers, M]
    int first_row = 0;  // row of the states
    int width = 0;      // 0: the term is absent
  } term[2];            // the sum of two terms
  OutputTensor<4> out;  // [B, T, readers, M] fp32
};

cudaError_t fp32_value_read(const ValueRead& problem, cudaStream_t stream);

struct KeyRead {
  Fp32ReadShape shape;
  InputTensor<4> p;  // [B, T, readers, M]
  InputTensor<4> s;  // [B, T, writers, M]
  InputTensor<4> y;  // [B, T, writers, width]
  int first_row;     // row of the states
  int width;
  OutputTensor<4> out;  // [B, T, readers, width]
};

cudaError_t fp32_key_read(const KeyRead& problem, cudaStream_t stream);

// The scan of both memories, for DType::f32.
cudaError_t fp32_scan(const GatedScan& problem, Workspace& workspace, cudaStream_t stream);

// p = feature(scale z) in place of z [rows, M]; with dp also the gradient dz in place of dp.
struct Fp32Feature {
  int64_t rows;
  int M, slots;  // the first `slots` of M columns exist; p is zero in the others
  Feature feature;
  float scale;
  float* z;   // [rows, M]
  float* dp;  // [rows, M], optional; becomes dz = scale * (gradient of the logits scale z)
  float* w;   // [rows, M], with dp: logits * (gradient of the logits) + p * dp
};

cudaError_t fp32_feature(const Fp32Feature& problem, cudaStream_t stream);

// The gradient of the gates from the states of both scans, including the gradient through s if s = 1 - e^g.
struct Fp32GateGradient {
  SequenceLayout tokens;
  int heads, query_heads, M;
  InputTensor<4> w;                 // [B, T, query_heads, M] fp32: reads * gradients of the reads
  InputTensor<4> w_factor;          // optional: w * w_factor takes the place of w
  InputTensor<4> s;                 // [B, T, heads, M]
  InputTensor<4> ds;                // [B, T, heads, M] fp32
  InputTensor<4> g;                 // [B, T, heads, M] fp32 if s = 1 - e^g; absent otherwise
  const float *states, *gradients;  // results of the forward and the reversed scan
  int width[2];                     // rows of each memory
  // [N, heads, width, M] fp32: the final state, and the gradient of the initial state.
  InputTensor<4> final_state[2], initial_gradient[2];
  OutputTensor<4> dg;  // [B, T, heads, M] fp32
};

cudaError_t fp32_gate_gradient(const Fp32GateGradient& problem, cudaStream_t stream);

// The slot weights and gates of ABC from its logits a_t:
//     z_t = log(e^{z_{t-1}} + e^{a_t})       s_t = e^{a_t - z_t}       g_t = z_{t-1} - z_t
// A logit of -inf marks a masked token: s = g = 0. If z is empty (-inf), the first token has s = 1, g = 0.
struct AbcGates {
  SequenceLayout tokens;
  int heads, M, slots;
  InputTensor<4> logits;   // [B, T, heads, slots] fp32, any strides
  InputTensor<3> initial;  // z_0 [N, heads, slots] fp32; absent: empty (-inf)
  OutputTensor<4> s, g;    // [B, T, heads, M] fp32; zero in the columns from `slots` on
  OutputTensor<3> final;   // [N, heads, slots] fp32
};

// The gradient of the logits and of z_0. Z_t is the gradient of z_t from later tokens; t runs from the end:
//     da_t = s_t (Z_t + e^{g_t} ds_t - dg_t)       Z_{t-1} = e^{g_t} Z_t - s_t (e^{g_t} ds_t - dg_t)
struct AbcGradient {
  SequenceLayout tokens;
  int heads, slots;
  InputTensor<4> s, g, ds, dg;  // [B, T, heads, slots] fp32
  InputTensor<3> final;         // gradient of the last z, [N, heads, slots] fp32, optional
  InputTensor<3> initial;       // z_0, optional
  OutputTensor<4> dlogits;      // [B, T, heads, slots] fp32
  OutputTensor<3> dinitial;     // [N, heads, slots] fp32, with initial
};

cudaError_t abc_gates(const AbcGates& problem, Workspace& workspace, cudaStream_t stream);
cudaError_t abc_gradient(const AbcGradient& problem, Workspace& workspace, cudaStream_t stream);

}  // namespace girih::kernels

// DeltaProduct in fp32: sums and states are fp32, products are three tf32 products of split numbers
// (tile/tf32.h). These kernels serve the calls that the 16-bit kernels do not: fp32 inputs, a beta for every
// channel with gates, with unit vectors or with D > 128, a function between chunks, more than 16 steps.
//
//     S <- e^{g_t} S                                          once a token, before its first step      [D, V]
//     for j < n:  u_{t,j} = w_{t,j} - S^T b_{t,j}             b = beta k,  w = beta v                     [V]
//                 S <- S + k_{t,j} u_{t,j}^T
//     o_t = scale * S_t^T q_t                                 after the last step                         [V]
//     S <- phi(S)                                             when a chunk is complete
//
// Columns of V are independent, so a block holds the state of some columns in registers. The scan processes
// tiles of up to 16 rows; a row is a step. i and j are rows in the order of time, q_i is the query of the
// token that row i ends, L_i the sum of the gates up to row i, E_ij = e^{L_i - L_j}, L_C the L of the last
// row:
//
//     A_ij = E_ij b_i . k_j  (j < i)        X = (1 + A)^-1        P_ij = scale E_ij q_i . k_j  (j <= i)
//     u = X (w - e^L B S)        O = scale e^L Q S + P u        S <- e^{L_C} S + K^T (e^{L_C - L} u)
//
// Reverse processes the tiles from the last to the first; dS is the gradient of S:
//
//     dS <- phi'(S) * dS                                      when a chunk is complete
//     du = X^T (e^{L_C - L} K dS + P^T dO)                    the gradient of w
//     dS <- e^{L_C} dS + scale Q^T (e^L dO) - B^T (e^L du)
//
// The other gradients are products over the rows i, j of a segment of up to 64 rows. S is the state before
// the segment, dS the gradient after it, E_ij the decay from row j to row i:
//
//     dq_i = scale (e^{L_i} S do_i + sum_{j<=i} E_ij (do_i . u_j) k_j)
//     db_i = -(e^{L_i} S du_i + sum_{j<i} E_ij (du_i . u_j) k_j)
//     dk_j = e^{L_C - L_j} dS u_j + sum_{i>=j} E_ij (scale (do_i . u_j) q_i)
//            - sum_{i>j} E_ij (du_i . u_j) b_i
//     dg_t = sum of the products of a write before token t and a read at t or later
//
// Kernels: `make_rows` computes b and w, and q and k of length 1; `scan` runs in both directions; `gradients`
// computes these products; `row_gradients` computes the gradients of the inputs from those of k, b, w and q.
//
// fp32 rows of q, k, b, w, do, u, du and their gradients are aligned to 16 bytes and padded with zeros to a
// multiple of 4 elements; D and V are the sizes of the inputs. u and o are contiguous; 64 of their rows have
// less than 2^31 elements.
#pragma once

#include <cuda_runtime_api.h>

#include "delta_product/delta_product.h"

namespace girih::kernels {

// Inputs with any strides and dtypes except fp64 (beta: also fp64), and the fp32 rows computed from them.
struct DeltaFp32Rows {
  DeltaFp32Shape shape;
  bool unit;                       // q and k are divided by their length
  InputTensor<4> q, k, v;          // [B, T, HQ, D], [B, T n, H, D], [B, T n, H, V]
  InputTensor<4> beta;             // [B, T n, H, D], or [B, T n, H] with a stride of 0
  OutputTensor<4> unit_q, unit_k;  // fp32, optional
  OutputTensor<4> b, w;            // fp32, w optional
};

cudaError_t delta_fp32_rows(const DeltaFp32Rows& problem, cudaStream_t stream);

// The scan. With `reverse`, `value` is do.
struct DeltaFp32Scan {
  DeltaFp32Shape shape;
  bool reverse;
  InputTensor<4> q, k, b;  // fp32, from delta_fp32_rows
  InputTensor<4> value;    // w [B, T n, H, V]; reverse: do [B, T, HQ, V], fp32
  InputTensor<3> g;        // [B, T, H] fp32, optional
  InputTensor<4> initial;  // [N, H, D, V] fp32; absent: zero
  OutputTensor<4> final;   // [N, H, D, V] fp32
  OutputTensor<4> o;       // forward [B, T, HQ, V] fp32, unit column stride
  OutputTensor<4> u;       // u or du [B, T n, H, V] fp32; absent: not stored
  // Output [segments, H, V, D] fp32. Forward: the state before every segment, before the function between
  // chunks; may be null. Reverse: dS after every segment.
  float* saved_states;
  const float* states;  // reverse with a function between chunks: `saved_states` of forward
  int64_t* position;    // [N], forward: tokens of the unfinished chunk; null: not stored
};

cudaError_t delta_fp32_scan(const DeltaFp32Scan& problem, cudaStream_t stream);

struct DeltaFp32Gradients {
  DeltaFp32Shape shape;
  InputTensor<4> q, k, b, dout;  // fp32, as in the scan
  InputTensor<4> u, du;
  InputTensor<3> g;  // [B, T, H] fp32; absent: no gates
  const float *states, *gradients;
  OutputTensor<4> dq, dk, db;  // fp32, layout of q, k, b
  float* dg;                   // [slabs of 64 of D, B, T, H]; the caller sums over slabs
};

cudaError_t delta_fp32_gradients(const DeltaFp32Gradients& problem, cudaStream_t stream);

struct DeltaFp32RowGradients {
  DeltaFp32Shape shape;
  bool unit;
  InputTensor<4> q, k, v, beta;             // the inputs
  InputTensor<4> dunit_q, dunit_k, db, dw;  // fp32
  OutputTensor<4> dq, dk, dv;               // dq is optional: absent if dq equals dunit_q
  bool has_channel_beta;                    // a beta for every channel
  OutputTensor<4> dbeta;
};

cudaError_t delta_fp32_row_gradients(const DeltaFp32RowGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

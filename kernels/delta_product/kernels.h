// The kernels of DeltaProduct with 16-bit operands (delta_product.h).
//
// A chunk has C = 64 / n tokens and up to 64 rows; a row is one step of one token. L_i is the sum of the
// gates from the start of the chunk through the token of row i. rho_i is 1 / sqrt(|k_i|^2 + 1e-6) if q and k
// are normalised, else 1. S is the state before the chunk. Then
//
//     A_ij = beta_i rho_i rho_j e^{L_i - L_j} k_i . k_j  (j < i)        X = (I + A)^-1
//     Z_i = beta_i v_i - beta_i rho_i e^{L_i} S^T k_i                   U = X Z
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//     S <- e^{L_C} S + sum_j k_j w_j U_j^T                              w_j = rho_j e^{L_C - L_j}
//
// Forward has two kernels:
//   prepare    X and the factors of the rows; chunks are independent
//   scan       U, S and the output; chunks in order
// Backward has two kernels, which read what forward saved. dS is the gradient of the state after the chunk.
// r_t = scale rho_t e^{L_t} is the factor of a query that reads S; read_i = beta_i rho_i e^{L_i} is the
// factor of a key that reads S:
//   reverse    chunks from the last to the first:
//                  dU_j = sum_t P_tj do_t + w_j dS^T k_j        G = X^T dU, the gradient of Z
//                  dS <- e^{L_C} dS + sum_t r_t q_t do_t^T - sum_i k_i read_i G_i^T
//   gradients  dq, dk, dv, dbeta, dg; chunks are independent
#pragma once

#include "delta_product/delta_product.h"
#include "tile/workspace.h"

namespace girih::kernels {

// The output of prepare for one chunk and head, in this order: the blocks of X on and below the diagonal
// (16 x 16 each, rounded), row factors (64 floats each), two flags stored as floats, and the rounding errors
// of X (X_lo, in the layout of X).
//
// has_inverse_lo: the rounding errors of X matter and are stored. If keys repeat and beta is large, products
// with X cancel almost all of their sums, or (steps close to reflections) the terms do not decay; the
// rounding errors of X then have the same sign in row after row.
//
// can_divide_by_beta: every |beta_i| is at least 2^-40, so reverse may store dv = beta G in place of G, and
// gradients divides by beta. Set only for bf16 without gates and without l2norm_qk: read_i is beta_i then, so
// dv is also the operand of the update of dS.
constexpr int kDeltaInverseBlocks = 10;
constexpr int kDeltaInverseBytes = kDeltaInverseBlocks * 512;
enum DeltaFactor : int {
  kDeltaBeta,         // beta_i
  kDeltaReadFactor,   // read_i = beta_i rho_i e^{L_i}
  kDeltaWriteFactor,  // w_i = rho_i e^{L_C - L_i}
  kDeltaLogDecay,     // L_i log2(e); entry 63 is L_C log2(e) in every chunk
  kDeltaRho,          // rho_i
  kDeltaFactorCount
};
// Byte offsets of the flags and of X_lo.
constexpr int kDeltaHasInverseLoOffset = kDeltaInverseBytes + kDeltaFactorCount * kDeltaChunkRows * 4;
constexpr int kDeltaCanDivideByBetaOffset = kDeltaHasInverseLoOffset + 4;
constexpr int kDeltaInverseLoOffset = kDeltaHasInverseLoOffset + 128;
static_assert(kDeltaPreparedBytes == kDeltaInverseLoOffset + kDeltaInverseBytes);

struct DeltaPrepare {
  DeltaShape shape;
  InputTensor<4> k;     // [B, T n, HK, D]
  InputTensor<4> b;     // [B, T n, H, D], used in place of beta k; absent: beta k
  InputTensor<3> beta;  // [B, T n, H], any dtype; absent if b is present
  InputTensor<3> g;     // [B, T, H], any dtype; absent: no gates
  void* prepared;       // [chunks, H, kDeltaPreparedBytes]; chunks = token_range_count(tokens,
                        // delta_chunk_tokens(n))
};

cudaError_t delta_prepare(const DeltaPrepare& problem, cudaStream_t stream);

struct DeltaScan {
  DeltaShape shape;
  InputTensor<4> q, k, v;  // [B, T, HQ, D], [B, T n, HK, D], [B, T n, H, V]
  InputTensor<4> b;        // [B, T n, H, D], the b of prepare; v is then w; absent: beta k
  bool gated;              // prepare had g
  const void* prepared;    // output of prepare for the same k, beta, g
  InputTensor<4> initial;  // [N, H, D, V] fp32; absent: zero
  OutputTensor<4> final;   // [N, H, D, V] fp32
  OutputTensor<4> o;       // [B, T, HO, V]
  void* states;  // dtype [chunks, H, V, D]: the transposed state before every chunk; null: not stored
  // [delta_saved_segments(), H, D, D], row-major: the transitions of all segments but the first and the last
  // of a sequence. Null if `states` is null.
  float* transitions;
};

// The workspace holds the end states of segments.
cudaError_t delta_scan(const DeltaScan& problem, Workspace& workspace, cudaStream_t stream);

struct DeltaReverse {
  DeltaShape shape;
  InputTensor<4> q, k, dout;  // [B, T, HQ, D], [B, T n, HK, D], [B, T, HO, V]
  InputTensor<4> b;           // the b of forward
  bool gated;
  const void* prepared;      // output of prepare in forward
  const float* transitions;  // output of the scan
  float* factors;            // [chunks, HO, 64]: scale rho_t of the tokens of a chunk, then scale
  InputTensor<4> initial;    // [N, H, D, V] fp32: gradient of the final state; absent: zero
  OutputTensor<4> final;     // [N, H, D, V] fp32: gradient of the initial state
  OutputTensor<4> dz;        // [B, T n, H, V], dtype: G, or dv (see can_divide_by_beta)
  bool in_place;             // dz and dv are the same tensor, so reverse may store dv
  void* gradients;           // dtype [chunks, H, V, D]: dS^T of every chunk
};

cudaError_t delta_reverse(const DeltaReverse& problem, Workspace& workspace, cudaStream_t stream);

// dq, dk and dg have one entry for each head of the output. The caller sums the entries of heads that share a
// query, a key or a memory. If HO > H, dk is fp32.
struct DeltaGradients {
  DeltaShape shape;
  InputTensor<4> q, k, v, dout, dz;
  bool in_place;  // dz and dv are the same tensor; requires HO = H
  bool gated;
  const void* prepared;
  const float* factors;
  const void* states;     // output of the scan
  const void* gradients;  // output of reverse
  InputTensor<4> initial,
      end;                // [N, H, D, V] fp32, optional: the initial state, the gradient of the final state
  OutputTensor<4> dq;     // [B, T, HO, D]
  OutputTensor<4> dk;     // [B, T n, HO, D], dtype or fp32
  OutputTensor<4> dv;     // [B, T n, H, V]
  OutputTensor<3> dbeta;  // [B, T n, H] fp32
  OutputTensor<3> dg;     // [B, T, HO] fp32; absent without gates
};

cudaError_t delta_gradients(const DeltaGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

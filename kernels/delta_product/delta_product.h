// DeltaProduct.
//
//     S <- e^{g_t} S                                          once a token, before its first step      [D, V]
//     for j < n:  S <- S + beta_{t,j} k_{t,j} (v_{t,j} - S^T k_{t,j})^T
//     o_t = scale * S_t^T q_t                                 after the last step                      [V]
//
// A chunk has C = 64 / n tokens and so up to 64 rows, a row a step. L_i sums the gates from the chunk's start
// through row i's token; rho_i is 1 / |k_i| where q and k are to be of unit length, else 1. Then
//
//     A_ij = beta_i rho_i rho_j e^{L_i - L_j} k_i . k_j  (j < i)        X = (I + A)^-1
//     Z_i = beta_i v_i - beta_i rho_i e^{L_i} S^T k_i                   U = X Z
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j                S the state before the chunk
//     S <- e^{L_C} S + sum_j k_j w_j U_j^T                              w_j = rho_j e^{L_C - L_j}
//
// in two kernels:
//   prepare    every chunk by itself: X and the factors of its rows
//   scan       from chunk to chunk, in order: U, S and the output
// and backward two, with what forward kept. dS: the gradient of the state after the chunk,
// r_t = scale rho_t e^{L_t}:
//   reverse    from chunk to chunk, from the end:
//                  dU_j = sum_t P_tj do_t + w_j dS^T k_j        G = X^T dU, the gradient of Z
//                  dS <- e^{L_C} dS + sum_t r_t q_t do_t^T - sum_i k_i beta_i rho_i e^{L_i} G_i^T
//   gradients  every chunk by itself: dq, dk, dv, dbeta, dg
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kDeltaRows = 64;             // of a chunk, at most
constexpr int kDeltaMaxWidth = 256;        // D and V
constexpr int kDeltaMaxSteps = 16;         // n
constexpr int kDeltaVectorMaxWidth = 128;  // D and V where b reads in place of beta k

// Tokens of a chunk.
__host__ __device__ constexpr int delta_chunk(int n) { return kDeltaRows / n; }

// Rows of every 16-bit array start at 16 bytes; D and V are multiples of 8, padded with zeros.
struct DeltaShape {
  Tokens tokens;
  int heads;        // H, the memory's
  int query_heads;  // of outputs, a multiple of H
  int key_share;    // memory heads that one head of k serves: k has H / key_share
  int query_share;  // outputs that one head of q serves, 1 where a memory has several of them
  int D, V;
  int n;
  bool unit;    // q and k are divided by their length
  DType dtype;  // of q, k, v, o: fp16 or bf16
  float scale;
};

// What prepare leaves of a chunk and head: the blocks of X on and below the diagonal, 16 x 16 each, rounded;
// vectors of 64 floats; two floats that say yes or no; and what rounding took from X.
//   flag     what rounding took matters: where strong steps repeat their keys products with X cancel all but
//            little of their sums, or, of steps that are nearly reflections, do not fade, and what X's
//            elements lose is the same in row after row
//   divides  G can be had out of dv = beta G, which reverse leaves in its place: no beta_i is near zero, and
//            without gates and unit vectors that is what the state takes, too
constexpr int kDeltaBlocks = 10;
constexpr int kDeltaInverseBytes = kDeltaBlocks * 512;
enum DeltaVector : int {
  kDeltaBeta,   // beta_i
  kDeltaRead,   // beta_i rho_i e^{L_i}
  kDeltaWrite,  // rho_i e^{L_C - L_i}
  kDeltaLog,    // L_i, base 2
  kDeltaUnit,   // rho_i
  kDeltaVectors
};
constexpr int kDeltaFlag = kDeltaInverseBytes + kDeltaVectors * kDeltaRows * 4;
constexpr int kDeltaDivides = kDeltaFlag + 4;
constexpr int kDeltaLost = kDeltaFlag + 128;
constexpr int kDeltaPreparedBytes = kDeltaLost + kDeltaInverseBytes;

struct DeltaPrepare {
  DeltaShape shape;
  In<4> k;         // [B, T n, HK, D]
  In<4> b;         // [B, T n, H, D]: what reads, in place of beta k; absent: beta k
  In<3> beta;      // [B, T n, H], any dtype; absent with b
  In<3> g;         // [B, T, H], any dtype; absent: no gates
  void* prepared;  // [piece_count(tokens, delta_chunk(n)), H, kDeltaPreparedBytes]
};

cudaError_t delta_prepare(const DeltaPrepare& problem, cudaStream_t stream);

struct DeltaScan {
  DeltaShape shape;
  In<4> q, k, v;         // [B, T, HQ, D], [B, T n, HK, D], [B, T n, H, V]
  In<4> b;               // [B, T n, H, D], as prepare had it, with w in v's place; absent: beta k
  bool gated;            // there is a g
  const void* prepared;  // of the same k, beta, g
  In<4> initial;         // [N, H, D, V] fp32, optional: zero
  Out<4> final;          // [N, H, D, V] fp32
  Out<4> o;              // [B, T, HO, V]
  void* states;          // dtype [pieces, H, V, D]: the state before every chunk, transposed; null: not kept
  // With states, [delta_kept_segments(), H, D, D]: the transition of every segment between a sequence's first
  // and its last, by rows; else null.
  float* transitions;
  void* workspace;  // delta_scan_workspace() bytes, may be null when that is 0
};

// Segments of all sequences as reverse is cut into, of which the scan keeps the transitions; 0 where it is
// not, the scan perhaps into two.
int64_t delta_kept_segments(const DeltaShape& shape);
int64_t delta_scan_workspace(const DeltaScan& problem);
cudaError_t delta_scan(const DeltaScan& problem, cudaStream_t stream);

struct DeltaReverse {
  DeltaShape shape;
  In<4> q, k, dout;  // [B, T, HQ, D], [B, T n, HK, D], [B, T, HO, V]
  In<4> b;           // as forward had it
  bool gated;
  const void* prepared;      // of forward
  const float* transitions;  // likewise
  float* factors;            // [pieces, HO, 64]: of a chunk's tokens scale rho_t
  In<4> initial;             // [N, H, D, V] fp32: the final state's gradient, optional: zero
  Out<4> final;              // [N, H, D, V] fp32: the initial state's
  Out<4> dz;                 // [B, T n, H, V], dtype: G, or dv
  bool in_place;             // dz becomes dv: it may have that already
  void* gradients;           // dtype [pieces, H, V, D]: dS of every chunk, transposed
  void* workspace;           // delta_reverse_workspace() bytes, may be null when that is 0
};

int64_t delta_reverse_workspace(const DeltaReverse& problem);
cudaError_t delta_reverse(const DeltaReverse& problem, cudaStream_t stream);

// Every output's head gives its own part of dq, dk and dg. Those of heads that share a query, a key or a
// memory are summed afterwards; of a memory that serves several outputs they are arrays in fp32.
struct DeltaGradients {
  DeltaShape shape;
  In<4> q, k, v, dout, dz;
  bool in_place;  // dz and dv are one: where no other query head reads dz
  bool gated;
  const void* prepared;
  const float* factors;
  const void* states;     // of the scan
  const void* gradients;  // of the reverse
  In<4> initial, end;     // [N, H, D, V] fp32, optional: the initial state, and the final one's gradient
  Out<4> dq;              // [B, T, HO, D]
  Out<4> dk;              // [B, T n, HO, D], dtype or fp32
  Out<4> dv;              // [B, T n, H, V]
  Out<3> dbeta;           // [B, T n, H] fp32
  Out<3> dg;              // [B, T, HO] fp32, absent without gates
};

cudaError_t delta_gradients(const DeltaGradients& problem, cudaStream_t stream);

// Of a token's steps, and of the query heads that one memory serves, in delta_step: what shared memory holds.
constexpr int kDeltaStepMost = 8;

// One token; any strides and types but fp64, D up to 256. The state is written in place.
struct DeltaStep {
  int64_t sequences;
  int heads, query_heads, key_share, query_share;  // as in DeltaShape
  int D, V, n;
  bool unit;
  float scale;
  In<3> q;       // [N, HQ, D]
  In<4> k, v;    // [N, n, HK, D], [N, n, H, V]
  In<4> beta;    // [N, n, H, D], with D = V: beta k and beta v are element by element; or [N, n, H], stride 0
  In<2> g;       // [N, H], optional
  Out<4> state;  // [N, H, D, V] fp32
  Out<3> o;      // [N, HO, V]
};

cudaError_t delta_step(const DeltaStep& problem, cudaStream_t stream);

// Whether the current device has the shared memory for these kernels at this width; vector: those with b too.
cudaError_t delta_fits(int D, bool vector, bool& fits);

}  // namespace girih::kernels

// DeltaProduct: the kernels with 16-bit operands.
//
//     S <- e^{g_t} S                                          once a token, before its first step      [D, V]
//     for j < n:  S <- S + beta_{t,j} k_{t,j} (v_{t,j} - S^T k_{t,j})^T
//     o_t = scale * S_t^T q_t                                 after the last step                      [V]
//
// A chunk has C = 64 / n tokens and up to 64 rows; a row is one step of one token. L_i is the sum of the
// gates from the start of the chunk through the token of row i. rho_i is 1 / |k_i| if q and k are normalised,
// else 1. S is the state before the chunk. Then
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
// Backward has two kernels, which read what forward saved. dS is the gradient of the state after the chunk
// and r_t = scale rho_t e^{L_t}:
//   reverse    chunks from the last to the first:
//                  dU_j = sum_t P_tj do_t + w_j dS^T k_j        G = X^T dU, the gradient of Z
//                  dS <- e^{L_C} dS + sum_t r_t q_t do_t^T - sum_i k_i beta_i rho_i e^{L_i} G_i^T
//   gradients  dq, dk, dv, dbeta, dg; chunks are independent
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kDeltaRows = 64;             // rows of a chunk, at most
constexpr int kDeltaMaxWidth = 256;        // largest D and V
constexpr int kDeltaMaxSteps = 16;         // largest n
constexpr int kDeltaVectorMaxWidth = 128;  // largest D and V with b in place of beta k

// Tokens of a chunk.
__host__ __device__ constexpr int delta_chunk(int n) { return kDeltaRows / n; }

// Every row of a 16-bit array is aligned to 16 bytes. D and V are multiples of 8, padded with zeros.
struct DeltaShape {
  Tokens tokens;
  int heads;        // H, heads of the memory
  int query_heads;  // HO, heads of the output, a multiple of H
  int key_share;    // H / HK: heads of the memory that share a head of k
  int query_share;  // HO / HQ: heads of the output that share a head of q; 1 if HO > H
  int D, V;
  int n;
  bool unit;    // q and k are divided by their length
  DType dtype;  // type of q, k, v, o: fp16 or bf16
  float scale;
};

// The output of prepare for one chunk and head: the blocks of X on and below the diagonal (16 x 16 each,
// rounded), row factors (64 floats each), two flags stored as floats, and the rounding errors of X.
//   flag     The rounding errors of X matter. If keys repeat and beta is large, products with X cancel almost
//   all of
//            their sums, or (steps close to reflections) the terms do not decay; the rounding errors of X
//            then have the same sign in row after row.
//   divides  reverse may store dv = beta G in place of G, because gradients can divide by beta: no beta_i is
//            close to zero. Set only without gates and without l2norm_qk; dv is then also the operand of the
//            update of dS.
constexpr int kDeltaBlocks = 10;
constexpr int kDeltaInverseBytes = kDeltaBlocks * 512;
enum DeltaVector : int {
  kDeltaBeta,   // beta_i
  kDeltaRead,   // beta_i rho_i e^{L_i}
  kDeltaWrite,  // rho_i e^{L_C - L_i}
  kDeltaLog,    // L_i, in units of log 2
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
  In<4> b;         // [B, T n, H, D], used in place of beta k; absent: beta k
  In<3> beta;      // [B, T n, H], any dtype; absent if b is present
  In<3> g;         // [B, T, H], any dtype; absent: no gates
  void* prepared;  // [chunks, H, kDeltaPreparedBytes]; chunks = piece_count(tokens, delta_chunk(n))
};

cudaError_t delta_prepare(const DeltaPrepare& problem, cudaStream_t stream);

struct DeltaScan {
  DeltaShape shape;
  In<4> q, k, v;         // [B, T, HQ, D], [B, T n, HK, D], [B, T n, H, V]
  In<4> b;               // [B, T n, H, D], the b of prepare; v is then w; absent: beta k
  bool gated;            // prepare had g
  const void* prepared;  // output of prepare for the same k, beta, g
  In<4> initial;         // [N, H, D, V] fp32; absent: zero
  Out<4> final;          // [N, H, D, V] fp32
  Out<4> o;              // [B, T, HO, V]
  void* states;          // dtype [chunks, H, V, D]: the transposed state before every chunk; null: not stored
  // [delta_kept_segments(), H, D, D], row-major: the transitions of all segments but the first and the last
  // of a sequence. Null if `states` is null.
  float* transitions;
  void* workspace;  // delta_scan_workspace() bytes; null if that is 0
};

// The number of segments into which reverse cuts all sequences, and for which the scan stores transitions. 0
// if reverse does not cut; the scan may still cut sequences into two segments.
int64_t delta_kept_segments(const DeltaShape& shape);
int64_t delta_scan_workspace(const DeltaScan& problem);
cudaError_t delta_scan(const DeltaScan& problem, cudaStream_t stream);

struct DeltaReverse {
  DeltaShape shape;
  In<4> q, k, dout;  // [B, T, HQ, D], [B, T n, HK, D], [B, T, HO, V]
  In<4> b;           // the b of forward
  bool gated;
  const void* prepared;      // output of prepare in forward
  const float* transitions;  // output of the scan
  float* factors;            // [chunks, HO, 64]: scale rho_t of the tokens of a chunk
  In<4> initial;             // [N, H, D, V] fp32: gradient of the final state; absent: zero
  Out<4> final;              // [N, H, D, V] fp32: gradient of the initial state
  Out<4> dz;                 // [B, T n, H, V], dtype: G or dv
  bool in_place;             // dz and dv are the same tensor, so reverse may store dv
  void* gradients;           // dtype [chunks, H, V, D]: the transposed dS of every chunk
  void* workspace;           // delta_reverse_workspace() bytes; null if that is 0
};

int64_t delta_reverse_workspace(const DeltaReverse& problem);
cudaError_t delta_reverse(const DeltaReverse& problem, cudaStream_t stream);

// dq, dk and dg have one entry for each head of the output. The caller sums the entries of heads that share a
// query, a key or a memory. If HO > H, dk is fp32.
struct DeltaGradients {
  DeltaShape shape;
  In<4> q, k, v, dout, dz;
  bool in_place;  // dz and dv are the same tensor; requires HO = H
  bool gated;
  const void* prepared;
  const float* factors;
  const void* states;     // output of the scan
  const void* gradients;  // output of reverse
  In<4> initial, end;     // [N, H, D, V] fp32, optional: the initial state, the gradient of the final state
  Out<4> dq;              // [B, T, HO, D]
  Out<4> dk;              // [B, T n, HO, D], dtype or fp32
  Out<4> dv;              // [B, T n, H, V]
  Out<3> dbeta;           // [B, T n, H] fp32
  Out<3> dg;              // [B, T, HO] fp32; absent without gates
};

cudaError_t delta_gradients(const DeltaGradients& problem, cudaStream_t stream);

// Limit of n and of HO / H in delta_step; set by shared memory.
constexpr int kDeltaStepMost = 8;

// One token. All strides and all types except fp64 are allowed, D up to 256. The state is updated in place.
struct DeltaStep {
  int64_t sequences;
  int heads, query_heads, key_share, query_share;  // as in DeltaShape
  int D, V, n;
  bool unit;
  float scale;
  In<3> q;       // [N, HQ, D]
  In<4> k, v;    // [N, n, HK, D], [N, n, H, V]
  In<4> beta;    // [N, n, H, D] with D = V (beta for every channel), or [N, n, H] with a last stride of 0
  In<2> g;       // [N, H], optional
  Out<4> state;  // [N, H, D, V] fp32
  Out<3> o;      // [N, HO, V]
};

cudaError_t delta_step(const DeltaStep& problem, cudaStream_t stream);

// Sets `fits` if the current device has enough shared memory for these kernels at width D. With `vector`: for
// the kernels with b.
cudaError_t delta_fits(int D, bool vector, bool& fits);

}  // namespace girih::kernels

// DeltaProduct in fp32: sums and states are, products are of two tf32 parts of each number (tile/tf32.h).
// What the kernels of 16-bit products leave over: fp32 inputs, a beta for every channel, a function between
// chunks, more than 16 steps.
//
//     S <- e^{g_t} S                                          once a token, before its first step      [D, V]
//     for j < n:  u_{t,j} = w_{t,j} - S^T b_{t,j}             b = beta k,  w = beta v                     [V]
//                 S <- S + k_{t,j} u_{t,j}^T
//     o_t = scale * S_t^T q_t                                 after the last step                         [V]
//     S <- phi(S)                                             when a chunk is complete
//
// The columns of V do not need each other, and the state of a few of them fits in registers. Time is walked
// by tiles of up to 16 rows, i and j in their order, q_i that of the token which row i ends, L_i the gates up
// to row i, E_ij = e^{L_i - L_j}, L_C that of the last:
//
//     A_ij = E_ij b_i . k_j  (j < i)        X = (1 + A)^-1        P_ij = scale E_ij q_i . k_j  (j <= i)
//     u = X (w - e^L B S)        O = scale e^L Q S + P u        S <- e^{L_C} S + K^T (e^{L_C - L} u)
//
// and backward from the last tile on; dS is the gradient of S:
//
//     dS <- phi'(S) * dS                                      when a chunk is complete
//     du = X^T (e^{L_C - L} K dS + P^T dO)                    the gradient of w
//     dS <- e^{L_C} dS + scale Q^T (e^L dO) - B^T (e^L du)
//
// With u, du, S before every piece of up to 64 rows and dS after it, the rest is products of a piece's rows,
// i and j in the order of time, S and dS those of the piece's ends, E_ij the decay from row j to row i:
//
//     dq_i = scale (e^{L_i} S do_i + sum_{j<=i} E_ij (do_i . u_j) k_j)
//     db_i = -(e^{L_i} S du_i + sum_{j<i} E_ij (du_i . u_j) k_j)
//     dk_j = e^{L_C - L_j} dS u_j + sum_{i>=j} E_ij (scale (do_i . u_j) q_i)
//            - sum_{i>j} E_ij (du_i . u_j) b_i
//     dg_t = the sum of what is written before token t times what reads it at t or later
//
// Five kernels: `rows` makes b and w, and q and k of unit length; `scan` and `reverse` walk; `gradients`
// takes the products; `row_gradients` goes from the gradients of k, b, w and q to those of the inputs.
//
// Rows of q, k, b, w, do, u, du and their gradients, in fp32, start at 16 bytes and go on with zeros to a
// multiple of 4 elements; D and V are what the inputs have. u and o are packed: 64 of their rows are less
// than 2^31 elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "delta_product/delta_product.h"
#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

enum class Between : int { none, gelu, tanh };

// How sequences are cut into pieces of up to 64 rows: chunks of tokens, into pieces of `size`. Without a
// function between chunks they are as long as pieces; with one a sequence may begin inside of a chunk, and
// there is one more piece after its last, whose state the function is given.
struct DeltaPieces {
  Tokens tokens;
  int size, chunk;
  Between between;
  const int64_t* position;  // [N]: tokens of its chunk that came before a sequence; null: none
};

// n at most kDeltaRows; chunk: of between.
inline DeltaPieces delta_pieces(const Tokens& tokens, int n, Between between, int64_t chunk,
                                const int64_t* position) {
  const int rows = delta_chunk(n);
  if (between == Between::none) return {tokens, rows, rows, between, nullptr};
  const int length = static_cast<int>(chunk);
  return {tokens, rows < length ? rows : length, length, between, position};
}

__host__ __device__ inline int pieces_of_chunk(const DeltaPieces& p) {
  return (p.chunk + p.size - 1) / p.size;
}
// Pieces of a row that is not packed; those by which packed sequences' shares are longer than their tokens'.
__host__ __device__ inline int64_t pieces_of_row(const DeltaPieces& p) {
  const int64_t chunks = p.between == Between::none ? (p.tokens.tokens + p.chunk - 1) / p.chunk
                                                    : (p.tokens.tokens + 2 * p.chunk - 2) / p.chunk + 1;
  return chunks * pieces_of_chunk(p);
}
__host__ __device__ inline int spare_chunks(const DeltaPieces& p) {
  return p.between == Between::none ? 1 : 3;
}
__host__ __device__ inline int64_t piece_count(const DeltaPieces& p) {
  if (!is_packed(p.tokens)) return p.tokens.batch * pieces_of_row(p);
  return (p.tokens.tokens / p.chunk + spare_chunks(p) * p.tokens.sequences) * pieces_of_chunk(p);
}

// The width of rows of fp32 arrays that is kept for `width` elements.
template <class Int>
__host__ __device__ constexpr Int in_fours(Int width) {
  return (width + 3) & ~Int{3};
}

struct DeltaExactShape {
  DeltaPieces pieces;
  int heads, query_heads;
  int D, V, n;
  float scale;
};

// Inputs, of any strides and dtypes but fp64 (beta: fp64 too), and the fp32 rows made of them.
struct DeltaExactRows {
  DeltaExactShape shape;
  bool unit;              // q and k are divided by their length
  In<4> q, k, v;          // [B, T, HQ, D], [B, T n, H, D], [B, T n, H, V]
  In<4> beta;             // [B, T n, H, D], or [B, T n, H] with a stride of 0
  Out<4> unit_q, unit_k;  // fp32, optional
  Out<4> b, w;            // fp32, w optional
};

cudaError_t delta_exact_rows(const DeltaExactRows& problem, cudaStream_t stream);

// Forward or, with do in w's place, reverse.
struct DeltaExactScan {
  DeltaExactShape shape;
  bool reverse;
  In<4> q, k, b;  // of the rows, fp32
  In<4> value;    // w [B, T n, H, V]; reverse: do [B, T, HQ, V], fp32
  In<3> g;        // [B, T, H] fp32, optional
  In<4> initial;  // [N, H, D, V] fp32, optional: zero
  Out<4> final;   // [N, H, D, V] fp32
  Out<4> o;       // forward [B, T, HQ, V] fp32, unit column stride
  Out<4> u;       // u or du [B, T n, H, V] fp32; absent: not kept
  // [piece_count, H, V, D] fp32, written: forward, unless null, the states before every piece, as they are
  // before the function between chunks; reverse dS after every piece.
  float* published;
  const float* states;  // reverse, with a function between chunks: what the forward published
  int64_t* position;    // [N]: of the chunk's tokens after the last, forward; null: there is none
};

cudaError_t delta_exact_scan(const DeltaExactScan& problem, cudaStream_t stream);

struct DeltaExactGradients {
  DeltaExactShape shape;
  In<4> q, k, b, dout;  // fp32, as in the scans
  In<4> u, du;
  In<3> g;  // [B, T, H] fp32; absent: no gates
  const float *states, *gradients;
  Out<4> dq, dk, db;  // fp32, like q, k, b
  float* dg;          // [slabs of 64 of D, B, T, H]: to be added up
};

cudaError_t delta_exact_gradients(const DeltaExactGradients& problem, cudaStream_t stream);

struct DeltaExactRowGradients {
  DeltaExactShape shape;
  bool unit;
  In<4> q, k, v, beta;             // the inputs
  In<4> dunit_q, dunit_k, db, dw;  // fp32
  Out<4> dq, dk, dv;               // dq optional: where dunit_q is all of it
  bool vector;                     // a beta for every channel
  Out<4> dbeta;
};

cudaError_t delta_exact_row_gradients(const DeltaExactRowGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

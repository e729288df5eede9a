// DeltaProduct in fp32: sums and states are fp32, products are three tf32 products of split numbers
// (tile/tf32.h). These kernels serve the calls that the 16-bit kernels do not: fp32 inputs, a beta for every
// channel, a function between chunks, more than 16 steps.
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

#include <cstdint>

#include "delta_product/delta_product.h"
#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

enum class Between : int { none, gelu, tanh };

// Cuts sequences into segments of up to 64 rows: sequences into chunks of `chunk` tokens, chunks into
// segments of `size` tokens. Without a function between chunks a chunk is one segment. With one, a sequence
// may begin inside of a chunk, and one more segment follows its last; its saved state is an argument of the
// function.
struct DeltaPieces {
  Tokens tokens;
  int size, chunk;
  Between between;
  const int64_t* position;  // [N]: tokens of the first chunk that came before the sequence; null: none
};

// n is at most kDeltaRows. `chunk` is the chunk of `between`.
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
// Segments of a batch row that is not packed. spare_chunks: chunks by which the segments of a packed sequence
// may exceed its tokens / chunk.
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

// `width` rounded up to a multiple of 4: the row length of fp32 arrays.
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

// Inputs with any strides and dtypes except fp64 (beta: also fp64), and the fp32 rows computed from them.
struct DeltaExactRows {
  DeltaExactShape shape;
  bool unit;              // q and k are divided by their length
  In<4> q, k, v;          // [B, T, HQ, D], [B, T n, H, D], [B, T n, H, V]
  In<4> beta;             // [B, T n, H, D], or [B, T n, H] with a stride of 0
  Out<4> unit_q, unit_k;  // fp32, optional
  Out<4> b, w;            // fp32, w optional
};

cudaError_t delta_exact_rows(const DeltaExactRows& problem, cudaStream_t stream);

// The scan. With `reverse`, `value` is do.
struct DeltaExactScan {
  DeltaExactShape shape;
  bool reverse;
  In<4> q, k, b;  // fp32, from delta_exact_rows
  In<4> value;    // w [B, T n, H, V]; reverse: do [B, T, HQ, V], fp32
  In<3> g;        // [B, T, H] fp32, optional
  In<4> initial;  // [N, H, D, V] fp32; absent: zero
  Out<4> final;   // [N, H, D, V] fp32
  Out<4> o;       // forward [B, T, HQ, V] fp32, unit column stride
  Out<4> u;       // u or du [B, T n, H, V] fp32; absent: not stored
  // Output [segments, H, V, D] fp32. Forward: the state before every segment, before the function between
  // chunks; may be null. Reverse: dS after every segment.
  float* published;
  const float* states;  // reverse with a function between chunks: `published` of forward
  int64_t* position;    // [N], forward: tokens of the unfinished chunk; null: not stored
};

cudaError_t delta_exact_scan(const DeltaExactScan& problem, cudaStream_t stream);

struct DeltaExactGradients {
  DeltaExactShape shape;
  In<4> q, k, b, dout;  // fp32, as in the scan
  In<4> u, du;
  In<3> g;  // [B, T, H] fp32; absent: no gates
  const float *states, *gradients;
  Out<4> dq, dk, db;  // fp32, layout of q, k, b
  float* dg;          // [slabs of 64 of D, B, T, H]; the caller sums over slabs
};

cudaError_t delta_exact_gradients(const DeltaExactGradients& problem, cudaStream_t stream);

struct DeltaExactRowGradients {
  DeltaExactShape shape;
  bool unit;
  In<4> q, k, v, beta;             // the inputs
  In<4> dunit_q, dunit_k, db, dw;  // fp32
  Out<4> dq, dk, dv;               // dq is optional: absent if dq equals dunit_q
  bool vector;                     // a beta for every channel
  Out<4> dbeta;
};

cudaError_t delta_exact_row_gradients(const DeltaExactRowGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

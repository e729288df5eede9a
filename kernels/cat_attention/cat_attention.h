// The attention of CAT. Row 0 of every chunk of C rows is its header. Row t of chunk c attends to the headers
// of the chunks of its sequence before c, and to the rows of its own chunk up to itself:
//
//     a_j = scale q_t.k_j        o_t = sum_j e^{a_j - lse_t} v_j        lse_t = log sum_j e^{a_j}
//
// Forward is one kernel. Backward recomputes p_j = e^{a_j - lse_t}, and with delta_t = do_t.o_t
//
//     da_j = p_j (do_t.v_j - delta_t)     dq_t = scale sum_j da_j k_j     dk_j = scale sum_t da_j q_t
//     dv_j = sum_t p_j do_t
//
// in three kernels. The first computes dq by tiles of queries and writes a CatQuery for each query. The
// second computes the terms of dk and dv of headers from later chunks: blocks of headers times tiles of
// queries, cut into runs of equal length, whose sums are written in fp32. The third computes the terms of dk
// and dv from the rows of the own chunk, and adds the sums of the second in their order. If the rows of a
// chunk are within one product of a warp (cat_joins()), the first kernel also computes dk and dv of all rows
// but headers, and the own-chunk terms of headers (shares), which the third kernel adds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kCatWidest = 256, kCatWidestFloat = 128;  // maximum of D and V for 16-bit elements and for fp32

// Rows of every array of elements are aligned to 16 bytes, and widths are multiples of 8. T and K are below
// 2^31 - 2^16.
struct CatShape {
  Tokens chunks;  // in units of chunks: K of a batch row, cu_chunks
  int rows;       // T
  int size;       // C
  int heads, query_heads;
  int D, V;
  float scale;
  DType dtype;  // of q, k, v, o

  __host__ __device__ int group() const { return query_heads / heads; }
};

struct CatForward {
  CatShape shape;
  In<4> q, k, v;  // [B, T, HQ, D], [B, T, H, D], [B, T, H, V]
  Out<4> o;       // [B, T, HQ, V]
  Out<3> lse;     // [B, T, HQ] fp32, optional; infinite for rows outside of all sequences
};
cudaError_t cat_forward(const CatForward& problem, cudaStream_t stream);

// The record of a query for backward. The query attends to the headers from `first` to before `chunk`, its
// own chunk.
struct CatQuery {
  float lse, delta;  // lse times kCatUnit (softmax.h)
  int first, chunk;
};

struct CatQueryGradients {
  CatShape shape;
  In<4> q, k, v, o, dout;
  In<3> lse;
  Out<4> dq;
  CatQuery* queries;  // [B, HQ, T], output
  Out<4> dk, dv;      // output, if cat_joins(): rows other than headers
  float* partials;    // output, if cat_joins(): shares of headers
};
cudaError_t cat_query_gradients(const CatQueryGradients& problem, cudaStream_t stream);

struct CatHeaderGradients {
  CatShape shape;
  In<4> q, k, v, dout;
  const CatQuery* queries;
  float* partials;  // output
};
cudaError_t cat_header_gradients(const CatHeaderGradients& problem, cudaStream_t stream);

struct CatOwnGradients {
  CatShape shape;
  In<4> q, k, v, dout;
  const CatQuery* queries;
  const float* partials;
  Out<4> dk, dv;
  bool groups = false;  // whether the partials are from the warpgroup kernel; set by cat_own_gradients()
};
cudaError_t cat_own_gradients(const CatOwnGradients& problem, cudaStream_t stream);

// Number of floats in `partials`, which the three kernels of backward share.
int64_t cat_partials(const CatShape& shape);

// fits: whether the current device has enough shared memory for these widths.
cudaError_t cat_fits(int D, int V, DType dtype, bool& fits);

}  // namespace girih::kernels

// CAT's attention. Row 0 of every chunk of C rows is its header; row t of chunk c reads the headers of the
// chunks of its sequence before c, and the rows of its own chunk up to itself:
//
//     a_j = scale q_t.k_j        o_t = sum_j e^{a_j - lse_t} v_j        lse_t = log sum_j e^{a_j}
//
// Forward is one kernel. Backward forms p_j = e^{a_j - lse_t} again, and with delta_t = do_t.o_t
//
//     da_j = p_j (do_t.v_j - delta_t)     dq_t = scale sum_j da_j k_j     dk_j = scale sum_t da_j q_t
//     dv_j = sum_t p_j do_t
//
// in three: dq, by tiles of queries, which leaves what the others need to know of a query; what headers get
// of later chunks, blocks of headers by tiles of queries, cut into runs of equal length whose sums are left
// in fp32; what keys get of their own chunk, which adds these sums in their order. Where a product of a warp
// is all that a chunk's rows give each other (cat_joins()), the first kernel has the last one's keys and
// queries at hand, and writes dk and dv of all rows but the headers, whose shares it leaves for a sum.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kCatWidest = 256, kCatWidestFloat = 128;  // D and V, of 16 bits and of fp32

// Rows of every array of elements start at 16 bytes, and widths are multiples of 8. T and K are below
// 2^31 - 2^16.
struct CatShape {
  Tokens chunks;  // counted in chunks: K of a batch row, cu_chunks
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
  Out<3> lse;     // [B, T, HQ] fp32, optional; infinite where no sequence owns the row
};
cudaError_t cat_forward(const CatForward& problem, cudaStream_t stream);

// What backward knows of a query: it reads the headers from `first` up to `chunk`, its own.
struct CatQuery {
  float lse, delta;  // lse times kCatUnit (softmax.h)
  int first, chunk;
};

struct CatQueryGradients {
  CatShape shape;
  In<4> q, k, v, o, dout;
  In<3> lse;
  Out<4> dq;
  CatQuery* queries;  // [B, HQ, T], written
  Out<4> dk, dv;      // some rows written, maybe
  float* partials;    // likewise
};
cudaError_t cat_query_gradients(const CatQueryGradients& problem, cudaStream_t stream);

struct CatHeaderGradients {
  CatShape shape;
  In<4> q, k, v, dout;
  const CatQuery* queries;
  float* partials;  // written
};
cudaError_t cat_header_gradients(const CatHeaderGradients& problem, cudaStream_t stream);

struct CatOwnGradients {
  CatShape shape;
  In<4> q, k, v, dout;
  const CatQuery* queries;
  const float* partials;
  Out<4> dk, dv;
  bool groups = false;  // whether the sums are those of warpgroups: cat_own_gradients() sees to it
};
cudaError_t cat_own_gradients(const CatOwnGradients& problem, cudaStream_t stream);

// Numbers of the headers' sums, which the three hand on.
int64_t cat_partials(const CatShape& shape);

// Whether the current device has the shared memory for these widths.
cudaError_t cat_fits(int D, int V, DType dtype, bool& fits);

}  // namespace girih::kernels

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
// in three kernels. The first computes dq by tiles of queries and writes a CatQueryRecord for each query. The
// second computes the terms of dk and dv of headers from later chunks: blocks of headers times tiles of
// queries, cut into runs of equal length, whose sums are written in fp32. The third computes the terms of dk
// and dv from the rows of the own chunk, and adds the sums of the second in their order. If the rows of a
// chunk are within one product of a warp (cat_has_fused_own_gradients()), the first kernel also computes dk
// and dv of all rows but headers, and the own-chunk terms of headers (shares), which the third kernel adds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"
#include "tile/workspace.h"

namespace girih::kernels {

constexpr int kCatMaxWidth = 256,
              kCatMaxWidthFp32 = 128;  // maximum of D and V for 16-bit elements and for fp32

// Rows of every array of elements are aligned to 16 bytes, and widths are multiples of 8. T and K are below
// 2^31 - 2^16.
struct CatShape {
  SequenceLayout chunks;  // in units of chunks: K of a batch row, cu_chunks
  int rows;               // T
  int size;               // C
  int heads, query_heads;
  int D, V;
  float scale;
  DType dtype;  // of q, k, v, o

  __host__ __device__ int group() const { return query_heads / heads; }
};

struct CatForward {
  CatShape shape;
  InputTensor<4> q, k, v;  // [B, T, HQ, D], [B, T, H, D], [B, T, H, V]
  OutputTensor<4> o;       // [B, T, HQ, V]
  OutputTensor<3> lse;     // [B, T, HQ] fp32, optional; infinite for rows outside of all sequences
};
cudaError_t cat_forward(const CatForward& call, cudaStream_t stream);

struct CatBackward {
  CatShape shape;
  InputTensor<4> q, k, v, o, dout;  // o and dout [B, T, HQ, V]
  InputTensor<3> lse;               // of CatForward
  OutputTensor<4> dq, dk, dv;       // shapes of q, k, v
};
cudaError_t cat_backward(const CatBackward& call, Workspace& workspace, cudaStream_t stream);

// fits: whether the current device has enough shared memory for these widths.
cudaError_t cat_fits(int D, int V, DType dtype, bool& fits);

}  // namespace girih::kernels

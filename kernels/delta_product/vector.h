// DeltaProduct with a beta for every channel, 16-bit operands: D = V, without gates and l2norm_qk.
//
//     b = beta (*) k        w = beta (*) v        both rounded
//     S <- S + k_{t,j} (w_{t,j} - S^T b_{t,j})^T
//
// make_rows computes b and w. prepare, scan and reverse of delta_product.h take b beside k, and w in place of
// v, so that G of reverse is dw. vector_gradients computes dq and the gradients of k and b, chunks
// independently. row_gradients computes the gradients of the inputs:
//
//     dk <- dk + beta (*) db        dv = beta (*) dw        dbeta = k (*) db + v (*) dw
#pragma once

#include "delta_product/delta_product.h"

namespace girih::kernels {

struct DeltaVectorRows {
  DeltaShape shape;
  In<4> k, v;   // [B, T n, HK, D], [B, T n, H, D]
  In<4> beta;   // [B, T n, H, D], fp32, bf16 or fp16, rows aligned to 16 bytes
  Out<4> b, w;  // [B, T n, H, D]
};

cudaError_t delta_vector_rows(const DeltaVectorRows& problem, cudaStream_t stream);

// S is the state before a chunk, dS the gradient of the state after it; rows i, j are in the order of time:
//
//     Z = W - B S        U = X Z
//     dq_t = scale (do_t S^T + sum_{rows j of tokens <= t} (do_t . U_j) k_j)
//     dk_j = U_j dS^T + scale sum_{t >= token of j} (do_t . U_j) q_t - sum_{i > j} (G_i . U_j) b_i
//     db_i = -(G_i S^T + sum_{j < i} (G_i . U_j) k_j)
struct DeltaVectorGradients {
  DeltaShape shape;
  In<4> q, k, b, w, dout;  // [B, T, HQ, D], [B, T n, HK, D], [B, T n, H, D] twice, [B, T, HO, D]
  In<4> dz;                // [B, T n, H, D]: G
  const void* prepared;    // output of prepare in forward
  const void* states;      // output of the scan
  const void* gradients;   // output of reverse
  Out<4> dq;               // [B, T, HO, D]
  Out<4> dk, db;           // [B, T n, H, D], summed over the query heads of a memory head
};

cudaError_t delta_vector_gradients(const DeltaVectorGradients& problem, cudaStream_t stream);

struct DeltaVectorRowGradients {
  DeltaShape shape;
  In<4> k, v, beta;  // the inputs
  In<4> db, dw;      // [B, T n, H, D]
  Out<4> dk;         // [B, T n, H, D]: in: dk with b fixed; out: dk
  Out<4> dv, dbeta;  // [B, T n, H, D]; dbeta has the type of beta
};

cudaError_t delta_vector_row_gradients(const DeltaVectorRowGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

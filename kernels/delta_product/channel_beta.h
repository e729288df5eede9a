// DeltaProduct with a beta for every channel, 16-bit operands: D = V, without gates and l2norm_qk.
//
//     b = beta (*) k        w = beta (*) v        both rounded
//     S <- S + k_{t,j} (w_{t,j} - S^T b_{t,j})^T
//
// make_rows computes b and w. prepare, scan and reverse of kernels.h take b beside k, and w in place of
// v, so that G of reverse is dw. channel_beta_gradients computes dq and the gradients of k and b, chunks
// independently. row_gradients computes the gradients of the inputs:
//
//     dk <- dk + beta (*) db        dv = beta (*) dw        dbeta = k (*) db + v (*) dw
#pragma once

#include "delta_product/kernels.h"

namespace girih::kernels {

struct DeltaChannelBetaRows {
  DeltaShape shape;
  InputTensor<4> k, v;   // [B, T n, HK, D], [B, T n, H, D]
  InputTensor<4> beta;   // [B, T n, H, D], fp32, bf16 or fp16, rows aligned to 16 bytes
  OutputTensor<4> b, w;  // [B, T n, H, D]
};

cudaError_t delta_channel_beta_rows(const DeltaChannelBetaRows& problem, cudaStream_t stream);

// S is the state before a chunk, dS the gradient of the state after it; rows i, j are in the order of time:
//
//     Z = W - B S        U = X Z
//     dq_t = scale (do_t S^T + sum_{rows j of tokens <= t} (do_t . U_j) k_j)
//     dk_j = U_j dS^T + scale sum_{t >= token of j} (do_t . U_j) q_t - sum_{i > j} (G_i . U_j) b_i
//     db_i = -(G_i S^T + sum_{j < i} (G_i . U_j) k_j)
struct DeltaChannelBetaGradients {
  DeltaShape shape;
  InputTensor<4> q, k, b, w, dout;  // [B, T, HQ, D], [B, T n, HK, D], [B, T n, H, D] twice, [B, T, HO, D]
  InputTensor<4> dz;                // [B, T n, H, D]: G
  const void* prepared;             // output of prepare in forward
  const void* states;               // output of the scan
  const void* gradients;            // output of reverse
  OutputTensor<4> dq;               // [B, T, HO, D]
  OutputTensor<4> dk, db;           // [B, T n, H, D], summed over the query heads of a memory head
};

cudaError_t delta_channel_beta_gradients(const DeltaChannelBetaGradients& problem, cudaStream_t stream);

struct DeltaChannelBetaRowGradients {
  DeltaShape shape;
  InputTensor<4> k, v, beta;  // the inputs
  InputTensor<4> db, dw;      // [B, T n, H, D]
  OutputTensor<4> dk;         // [B, T n, H, D]: in: dk with b fixed; out: dk
  OutputTensor<4> dv, dbeta;  // [B, T n, H, D]; dbeta has the type of beta
};

cudaError_t delta_channel_beta_row_gradients(const DeltaChannelBetaRowGradients& problem,
                                             cudaStream_t stream);

}  // namespace girih::kernels

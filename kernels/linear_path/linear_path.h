// What a linear path makes of an attention's q, k and v before its memory (TPTT eq. 4, 5, 22):
//
//     virtual rows   u = silu(x) / |silu(x)|
//                    r_0 = u,    r_m at t = (r_{m-1} at t - r_{m-1} at t - 1) / 2
//     channel gate   beta at t = sigmoid(total at t / (t + 1)),    total: the sum of x up to t
//     pooled gate    the mean of that over D
//
// Before the first token u is 0. Written out, r_m at t is the sum over j of (-1)^j C(m, j) 2^-m u at t - j.
// All tensors are dense and begin at a multiple of 32 bytes, D is a multiple of kLinearPathPack up to
// kLinearPathWidest. All arithmetic is fp32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"

namespace girih::kernels {

constexpr int kLinearPathPack = 8, kLinearPathWidest = 256;
constexpr int kMostVirtualRows = 4;
constexpr float kShortestLength = 1e-6f;  // what a shorter silu(x) is divided by

struct VirtualRowsShape {
  int64_t batch, tokens;
  int query_heads, heads;  // x has the heads of q, of k, of v
  int D;
  int n;  // rows a token of k and v: 1..kMostVirtualRows
  DType dtype;
};

struct VirtualRows {
  VirtualRowsShape shape;
  const void* x;  // [B, T, query_heads + 2 heads, D]
  void* q;        // [B, T, query_heads, D]
  void *k, *v;    // [B, T n, heads, D], a token's rows one after the other
};
cudaError_t virtual_rows(const VirtualRows& problem, cudaStream_t stream);

struct VirtualRowsBackward {
  VirtualRowsShape shape;
  const void *x, *dq, *dk, *dv;
  void* dx;
};
cudaError_t virtual_rows_backward(const VirtualRowsBackward& problem, cudaStream_t stream);

struct PooledGate {
  int64_t batch, tokens;
  int heads, D;
  DType dtype;
  const void* total;  // [B, T, H, D]
  float* beta;        // [B, T, H]
};
cudaError_t pooled_gate(const PooledGate& problem, cudaStream_t stream);

struct PooledGateBackward {
  int64_t batch, tokens;
  int heads, D;
  DType dtype;
  const void* total;
  const float* dbeta;
  void* dtotal;
};
cudaError_t pooled_gate_backward(const PooledGateBackward& problem, cudaStream_t stream);

struct ChannelGate {
  int64_t batch, tokens;
  int heads, D, n;
  DType dtype;
  const void* total;  // [B, T, H, D]
  void* beta;         // [B, T n, H, D], a token's rows one after the other, all the same
};
cudaError_t channel_gate(const ChannelGate& problem, cudaStream_t stream);

struct ChannelGateBackward {
  int64_t batch, tokens;
  int heads, D, n;
  DType dtype;
  const void *total, *dbeta;
  void* dtotal;
};
cudaError_t channel_gate_backward(const ChannelGateBackward& problem, cudaStream_t stream);

}  // namespace girih::kernels

// What a linear path makes of an attention's q, k and v before its memory (TPTT eq. 4, 5, 22):
//
//     virtual rows   u = silu(x) / |silu(x)|
//                    r_0 = u,    r_m at t = (r_{m-1} at t - r_{m-1} at t - 1) / 2
//     running sum    total at t: the sum of x up to t
//     channel gate   beta at t = sigmoid(total at t / (t + 1))
//     pooled gate    the mean of that over D
//
// Before the first token u is 0. D is a multiple of kLinearPathPack up to kLinearPathWidest. Tensors are
// dense and begin at a multiple of 32 bytes, but those that are TokenRows. All arithmetic is fp32; where
// results have 16 bits, a sigmoid is good to 2^-20.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"

namespace girih::kernels {

constexpr int kLinearPathPack = 8, kLinearPathWidest = 256;
constexpr int kMostVirtualRows = 4;
constexpr float kShortestLength = 1e-6f;  // what a shorter silu(x) is divided by

// [B, T, H, D] with a token's heads one after the other: elements from a sequence to the next, and from a
// token. Packs lie at multiples of their size.
struct TokenRows {
  const void* data;
  int64_t sequence, token;
};

struct VirtualRowsShape {
  int64_t batch, tokens;
  int query_heads, heads;  // of q; of k and of v
  int D;
  int n;  // rows a token of k and v: 1..kMostVirtualRows
  DType dtype;
};

struct VirtualRows {
  VirtualRowsShape shape;
  TokenRows q, k, v;  // [B, T, query_heads, D], [B, T, heads, D]
  void* of_q;         // [B, T, query_heads, D]
  void *of_k, *of_v;  // [B, T n, heads, D], a token's rows one after the other
};
cudaError_t virtual_rows(const VirtualRows& problem, cudaStream_t stream);

struct VirtualRowsBackward {
  VirtualRowsShape shape;
  TokenRows q, k, v;
  const void *of_q, *of_k, *of_v;  // gradients of the rows
  void *dq, *dk, *dv;
};
cudaError_t virtual_rows_backward(const VirtualRowsBackward& problem, cudaStream_t stream);

struct RunningSum {
  int64_t batch, tokens;
  int columns;           // H D, a multiple of kLinearPathPack
  bool from_end;         // of the tokens from t on, and not up to t
  DType of_x, of_total;  // the same; or one fp16 and the other fp32, as sums of fp16 leave its range
  TokenRows x;
  void* total;  // [B, T, H, D]
};
cudaError_t running_sum(const RunningSum& problem, cudaStream_t stream);

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

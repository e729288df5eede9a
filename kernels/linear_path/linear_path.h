// The inputs of the memory of a linear path, from q, k and v of attention (TPTT eq. 4, 5, 22):
//
//     virtual rows   u = silu(x) / |silu(x)|
//                    r_0 = u,    r_m at t = (r_{m-1} at t - r_{m-1} at t - 1) / 2
//     running sum    total at t: the sum of x up to t
//     channel gate   beta at t = sigmoid(total at t / (t + 1))
//     pooled gate    beta at t = mean over D of sigmoid(total at t / (t + 1))
//
// u is 0 before the first token. D is a multiple of kLinearPathPack up to kLinearPathWidest. All tensors but
// TokenRows are contiguous and aligned to 32 bytes. All arithmetic is fp32; for 16-bit results, the relative
// error of a sigmoid is 2^-20.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"

namespace girih::kernels {

constexpr int kLinearPathPack = 8, kLinearPathWidest = 256;
constexpr int kMostVirtualRows = 4;
constexpr float kShortestLength = 1e-6f;  // a shorter silu(x) is divided by this length

// A tensor [B, T, H, D] whose heads of a token are contiguous. `sequence` and `token` are the strides of B
// and T in elements. Packs are aligned to their size.
struct TokenRows {
  const void* data;
  int64_t sequence, token;
};

struct VirtualRowsShape {
  int64_t batch, tokens;
  int query_heads, heads;  // heads of q; heads of k and of v
  int D;
  int n;  // rows of k and v for each token: 1..kMostVirtualRows
  DType dtype;
};

struct VirtualRows {
  VirtualRowsShape shape;
  TokenRows q, k, v;  // [B, T, query_heads, D], [B, T, heads, D]
  void* of_q;         // [B, T, query_heads, D]
  void *of_k, *of_v;  // [B, T n, heads, D], the n rows of a token in order
};
cudaError_t virtual_rows(const VirtualRows& problem, cudaStream_t stream);

struct VirtualRowsBackward {
  VirtualRowsShape shape;
  TokenRows q, k, v;
  const void *of_q, *of_k, *of_v;  // gradients of the virtual rows
  void *dq, *dk, *dv;
};
cudaError_t virtual_rows_backward(const VirtualRowsBackward& problem, cudaStream_t stream);

struct RunningSum {
  int64_t batch, tokens;
  int columns;           // H D, a multiple of kLinearPathPack
  bool from_end;         // sum the tokens from t to the end, instead of those up to t
  DType of_x, of_total;  // equal, or one fp16 and the other fp32: sums of fp16 can exceed its range
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
  void* beta;         // [B, T n, H, D], n equal rows for each token
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

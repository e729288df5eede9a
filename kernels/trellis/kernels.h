// The kernels of the tensor cores (trellis.h), which plan.cu launches.
//
// L_t is the sum of g over the tokens of the chunk up to and including t, and L_C is the sum over the chunk.
// Both count only the tokens of this call. The kernels have L in units of log2: e^{L} is exp2(L).
//
// Forward:
//     scan      updates both memories chunk by chunk and computes both reads; stores u, z and the memory
//               before every chunk for backward
//     output    computes the reads of all chunks in parallel, on devices without clusters
// Backward, from the tensors that forward stores:
//     dq        computes r, dr, dy and dq of all chunks in parallel
//     reverse   computes the gradients of the memories chunk by chunk, from the end: du, dz, -J du, dk, dv,
//               dgamma and the terms whose sum is dg
#pragma once

#include "trellis/trellis.h"

namespace girih::kernels {

// Gates of a token. L_t is log_decay + log_decay_error, where the error is what rounding has taken from
// log_decay. log_decay_to_end is L_C - L_t.
struct alignas(16) TokenGate {
  float log_decay, log_decay_error, log_decay_to_end, gamma;
};
struct TrellisGates {
  TrellisShape shape;
  InputTensor<3> gamma, g;  // [B, T, H], g optional
  TokenGate* tokens;        // [B, T, H]
};
cudaError_t trellis_gates(const TrellisGates& problem, cudaStream_t stream);

// Fields without a comment are those of TrellisForward or TrellisBackward.
struct TrellisScan {
  TrellisShape shape;
  const TokenGate* gates;  // [B, T, H]
  InputTensor<4> x[2], a;
  const float* weight = nullptr;
  InputTensor<4> chunk_start[2], initial[2];
  OutputTensor<4> last_chunk_start[2], last[2];
  int64_t* last_position;
  InputTensor<4> q;
  OutputTensor<4> o;  // absent if trellis_scan_has_output() returns false
  // Each optional: u and memories for trellis_output() and backward, z and row_stats for backward
  OutputTensor<4> u[2], z[2], row_stats[2];
  void* memories[2];
};
cudaError_t trellis_scan(const TrellisScan& problem, cudaStream_t stream);
// Whether the scan computes o on the current device: with two memories this needs clusters.
cudaError_t trellis_scan_has_output(const TrellisShape& shape, bool& has_output);

// Computes the reads of all chunks. Needs two memories.
struct TrellisOutput {
  TrellisShape shape;
  const TokenGate* gates;
  InputTensor<4> q;
  InputTensor<4> x[2], u[2];
  const void* memories[2];
  OutputTensor<4> o;
};
cudaError_t trellis_output(const TrellisOutput& problem, cudaStream_t stream);

// A read is l_t^T A_t w_t: (l, w) = (dy, q) for keys and (r, do) for values. With one memory dr is do, and r
// is not stored.
struct TrellisDq {
  TrellisShape shape;
  const TokenGate* gates;
  InputTensor<4> q;
  InputTensor<4> x[2], u[2];
  const void* memories[2];
  InputTensor<4> dout;
  OutputTensor<4> dq;
  OutputTensor<4> l[2];  // [B, T, H, M], dtype
};
cudaError_t trellis_dq(const TrellisDq& problem, cudaStream_t stream);

struct TrellisReverse {
  TrellisShape shape;
  const TokenGate* gates;
  InputTensor<4> x[2], w[2], l[2], z[2], u[2], row_stats[2];
  InputTensor<4> a;
  const float* weight = nullptr;
  float* dweight = nullptr;
  InputTensor<4> chunk_start[2];
  const void* memories[2];
  InputTensor<4> dlast_chunk_start[2], dlast[2];
  OutputTensor<4> dchunk_start[2], dinitial[2];
  OutputTensor<4> da[2], dx[2];
  float* dgammas;  // [memories, B, T, H]
  float* dL;       // [memories, tiles of a chunk, B, T, H], optional: terms that gates.cu sums
};
cudaError_t trellis_reverse(const TrellisReverse& problem, cudaStream_t stream);

struct TrellisGateGradients {
  TrellisShape shape;
  const float *dgammas, *dL;
  OutputTensor<3> dgamma, dg;
};
cudaError_t trellis_gate_gradients(const TrellisGateGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels

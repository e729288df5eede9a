// Trellis: two memories A [M, X], one of keys and one of values, that compress vectors x_t onto targets a_t.
//
//     z_t = A' x_t      u_t = J_phi(z_t)^T (phi(z_t) - a_t)      A_t = e^{g_t} A_{t-1} - gamma_t u_t x_t^T
//     memory of keys [M, D]      x_t = k_t    r_t = f(A_t q_t)
//     memory of values [M, V]    x_t = v_t    o_t = A_t^T r_t
//
// A' is the memory at the start of the chunk. The update of a memory depends neither on the other memory nor
// on a read. TTT has the memory of keys only, and its output is r [M].
//
// Forward:
//     scan      updates both memories chunk by chunk and computes both reads; stores u, z and the memory
//               before every chunk for backward
//     output    computes the reads of all chunks in parallel, on devices without clusters
// Backward, from the tensors that forward stores:
//     rows      computes r, dr, dy and dq of all chunks in parallel
//     reverse   computes the gradients of the memories chunk by chunk, from the end: du, dz, -J du, dk, dv,
//               dgamma and the terms whose sum is dg
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "time/chunks.h"

namespace girih::kernels {

constexpr int kTrellisWidest = 128;  // M, D and V

// phi and f: an optional silu, then a norm.
enum class Norm : int { none, l2, layer, softmax };
struct TrellisMap {
  bool silu;
  Norm norm;
};

// Rows of every 16-bit array start at 16 bytes: strides and widths are multiples of 8.
struct TrellisShape {
  ChunkGrid grid;
  int heads;         // H, also the number of query heads
  int memories = 2;  // 1: the memory of keys only; V is 0, arrays of values are absent, and o is r
  int D, V, M;
  int slots;    // slots of the caller's M; the other slots are padding
  DType dtype;  // dtype of q, k, v, a, o and of the stored memories: fp16 or bf16
  TrellisMap phi, f;

  __host__ __device__ int width(int memory) const { return memory == 0 ? D : V; }
  __host__ __device__ int output_width() const { return memories == 1 ? M : V; }
};

// Width of the square tile [slots, columns] that stores a memory in 16 bits, in the layout of SharedTile.
// Padding is 0.
__host__ __device__ inline int trellis_tile(const TrellisShape& shape) {
  return shape.M <= 64 && shape.D <= 64 && shape.V <= 64 ? 64 : 128;
}

// Of a token, in units of log2: L_t, the rounding error of L_t, L_C - L_t; and gamma_t.
struct alignas(16) TokenGate {
  float through, lost, after, gamma;
};
struct TrellisGates {
  TrellisShape shape;
  In<3> gamma, g;     // [B, T, H], g optional
  TokenGate* tokens;  // [B, T, H]
};
cudaError_t trellis_gates(const TrellisGates& problem, cudaStream_t stream);

// Arrays of two have an entry for each memory: 0 keys, 1 values. States are fp32 [N, H, M, X] with any
// strides.
struct TrellisScan {
  TrellisShape shape;
  const TokenGate* gates;  // [B, T, H]
  In<4> x[2];              // [B, T, H, X]
  In<4> a;                 // [B, T, H, M]
  // weight of phi, [H, M], optional; needs one memory and a phi without softmax
  const float* weight = nullptr;
  // A' of the chunk in which a sequence starts; absent without positions, then A' is `initial`
  In<4> first[2];
  In<4> initial[2];        // A before token 0
  Out<4> last_first[2];    // A' of the chunk of the next token
  Out<4> last[2];          // A after the last token
  int64_t* last_position;  // [N]
  In<4> q;                 // [B, T, H, D]
  Out<4> o;                // [B, T, H, V or M]; absent if trellis_scan_reads() returns false
  // Optional, for backward and trellis_output(): u and z, [B, T, H, M] in dtype; the Fit (maps.cuh) of z, [B,
  // T, H, 4] in fp32, with a weight followed by its WeightFit, [B, T, H, 8]; A before every chunk,
  // [chunk_count, H, tile, tile].
  Out<4> u[2], z[2], fit[2];
  void* memories[2];
};
cudaError_t trellis_scan(const TrellisScan& problem, cudaStream_t stream);
// Whether the scan computes o on the current device: with two memories this needs clusters.
cudaError_t trellis_scan_reads(const TrellisShape& shape, bool& reads);

// Needs two memories.
struct TrellisOutput {
  TrellisShape shape;
  const TokenGate* gates;
  In<4> q;  // [B, T, H, D]
  In<4> x[2], u[2];
  const void* memories[2];
  Out<4> o;  // [B, T, H, V]
};
cudaError_t trellis_output(const TrellisOutput& problem, cudaStream_t stream);

// A read is l_t^T A_t w_t: (l, w) = (dy, q) for keys and (r, do) for values. With one memory dr is do, and r
// is not stored.
struct TrellisRows {
  TrellisShape shape;
  const TokenGate* gates;
  In<4> q;
  In<4> x[2], u[2];
  const void* memories[2];
  In<4> dout;  // [B, T, H, V or M], dtype
  Out<4> dq;
  Out<4> l[2];  // [B, T, H, M], dtype
};
cudaError_t trellis_rows(const TrellisRows& problem, cudaStream_t stream);

struct TrellisReverse {
  TrellisShape shape;
  const TokenGate* gates;
  In<4> x[2], w[2], l[2], z[2], u[2], fit[2];
  In<4> a;
  const float* weight = nullptr;  // as in TrellisScan
  float* dweight = nullptr;       // [N, H, M], one row for each sequence; present if there is a weight
  In<4> first[2];
  const void* memories[2];
  In<4> dlast_first[2], dlast[2];  // fp32 [N, H, M, X]; absent: zero
  Out<4> dfirst[2];                // fp32 [N, H, M, X], present if there are positions
  Out<4> dinitial[2];              // fp32 [N, H, M, X]
  Out<4> da[2];                    // [B, T, H, M], dtype, of each memory; da is the sum over the memories
  Out<4> dx[2];                    // [B, T, H, X]
  float* dgammas;                  // [memories, B, T, H]
  float* dL;  // [memories, tiles of a chunk, B, T, H], optional: terms that gates.cu sums
};
cudaError_t trellis_reverse(const TrellisReverse& problem, cudaStream_t stream);

struct TrellisGateGradients {
  TrellisShape shape;
  const float *dgammas, *dL;
  Out<3> dgamma, dg;  // [B, T, H] fp32, dg optional
};
cudaError_t trellis_gate_gradients(const TrellisGateGradients& problem, cudaStream_t stream);

// Whether the current device has enough shared memory for these kernels.
cudaError_t trellis_fits(bool& fits);

// One token; any sizes and strides, any types but fp64. The state is updated in place.
struct TrellisStep {
  int64_t sequences;
  int heads, query_heads;
  int memories = 2;  // 1: the memory of keys only; V is 0
  int D, V, M, chunk;
  TrellisMap phi, f;
  In<3> q, k, v, a;            // [N, HQ, D], [N, H, D], [N, H, V], [N, H, M]
  In<2> weight;                // weight of phi, [H, M], optional; needs one memory
  In<2> gamma, g;              // [N, H], g optional
  Out<4> first[2], memory[2];  // [N, H, M, X] fp32
  int64_t* position;           // [N]
  Out<3> o;                    // [N, HQ, V or M]
};
cudaError_t trellis_step(const TrellisStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

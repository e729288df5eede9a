// Trellis: two memories A [M, X], one of keys and one of values, that compress vectors x_t onto targets a_t.
//
//     z_t = A' x_t      u_t = J_phi(z_t)^T (phi(z_t) - a_t)      A_t = e^{g_t} A_{t-1} - gamma_t u_t x_t^T
//     memory of keys [M, D]      x_t = k_t    r_t = f(A_t q_t)
//     memory of values [M, V]    x_t = v_t    o_t = A_t^T r_t
//
// A' is the memory at the start of the chunk. The update of a memory depends neither on the other memory nor
// on a read. TTT has the memory of keys only, and its output is r [M].
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

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "time/chunks.h"

namespace girih::kernels {

constexpr int kTrellisMaxWidth = 128;  // M, D and V

// Index of a memory in arrays of two.
enum MemoryIndex : int { kKeyMemory, kValueMemory };

// phi and f: an optional silu, then a norm. softmax has no silu.
enum class Norm : int { none, l2, layer, softmax };
struct TrellisMap {
  bool silu;
  Norm norm;
};

// Rows of every 16-bit array start at 16 bytes: strides and widths are multiples of 8.
struct TrellisShape {
  ChunkGrid grid;  // sequences and their chunks
  int heads;       // H, also the number of query heads
  // number of memories; 1: the memory of keys only; V is 0, arrays of values are absent, and o is r
  int memories = 2;
  int D, V;
  int M;        // row length of a, u, z and r, a multiple of 8
  int slots;    // slots that exist, at most M; the others are padding, and states do not have them
  DType dtype;  // dtype of q, k, v, a, o and of the stored memories: fp16 or bf16
  TrellisMap phi, f;

  __host__ __device__ int width(int memory) const { return memory == kKeyMemory ? D : V; }
  __host__ __device__ int output_width() const { return memories == 1 ? M : V; }
};

// Width of the square tile [slots, columns] that stores a memory in 16 bits, in the layout of SharedTile.
// Padding is 0.
__host__ __device__ inline int trellis_tile_width(const TrellisShape& shape) {
  return shape.M <= 64 && shape.D <= 64 && shape.V <= 64 ? 64 : 128;
}

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

// Arrays of two have an entry for each memory, by MemoryIndex. States are fp32 [N, H, slots, X] with
// any strides.
struct TrellisScan {
  TrellisShape shape;
  const TokenGate* gates;  // [B, T, H]
  InputTensor<4> x[2];     // [B, T, H, X]
  InputTensor<4> a;        // [B, T, H, M]
  // weight of phi, [H, M], optional; needs one memory and a phi without softmax
  const float* weight = nullptr;
  // A' of the chunk in which a sequence starts, `initial` if the position is 0; absent without positions,
  // then A' is `initial`
  InputTensor<4> chunk_start[2];
  InputTensor<4> initial[2];            // A before token 0; absent: zero
  OutputTensor<4> last_chunk_start[2];  // A' of the chunk of the next token
  OutputTensor<4> last[2];              // A after the last token
  int64_t* last_position;               // [N]
  InputTensor<4> q;                     // [B, T, H, D]
  OutputTensor<4> o;  // [B, T, H, V or M]; absent if trellis_scan_has_output() returns false
  // Optional, for backward and trellis_output(): u and z, [B, T, H, M] in dtype; the MapStats (maps.cuh) of
  // z, [B, T, H, 4] in fp32, with a weight followed by the WeightedMapStats, [B, T, H, 8]; memories: A before
  // the first token of every chunk in this call, [chunk_count, H, tile, tile] with trellis_tile_width().
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
  InputTensor<4> q;  // [B, T, H, D]
  InputTensor<4> x[2], u[2];
  const void* memories[2];
  OutputTensor<4> o;  // [B, T, H, V]
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
  InputTensor<4> dout;  // [B, T, H, V or M], dtype
  OutputTensor<4> dq;
  OutputTensor<4> l[2];  // [B, T, H, M], dtype
};
cudaError_t trellis_dq(const TrellisDq& problem, cudaStream_t stream);

struct TrellisReverse {
  TrellisShape shape;
  const TokenGate* gates;
  InputTensor<4> x[2], w[2], l[2], z[2], u[2], row_stats[2];
  InputTensor<4> a;
  const float* weight = nullptr;  // as in TrellisScan
  float* dweight = nullptr;       // [N, H, M], one row for each sequence; present if there is a weight
  InputTensor<4> chunk_start[2];
  const void* memories[2];
  InputTensor<4> dlast_chunk_start[2], dlast[2];  // fp32 [N, H, M, X]; absent: zero
  OutputTensor<4> dchunk_start[2];                // fp32 [N, H, M, X], present if there are positions
  OutputTensor<4> dinitial[2];                    // fp32 [N, H, M, X]
  OutputTensor<4> da[2];  // [B, T, H, M], dtype, of each memory; da is the sum over the memories
  OutputTensor<4> dx[2];  // [B, T, H, X]
  float* dgammas;         // [memories, B, T, H]
  float* dL;              // [memories, tiles of a chunk, B, T, H], optional: terms that gates.cu sums
};
cudaError_t trellis_reverse(const TrellisReverse& problem, cudaStream_t stream);

struct TrellisGateGradients {
  TrellisShape shape;
  const float *dgammas, *dL;
  OutputTensor<3> dgamma, dg;  // [B, T, H] fp32, dg optional
};
cudaError_t trellis_gate_gradients(const TrellisGateGradients& problem, cudaStream_t stream);

// Whether the current device has enough shared memory for these kernels.
cudaError_t trellis_fits(bool& fits);

// One token; any sizes and strides, any types but fp64. The state is updated in place.
struct TrellisStep {
  int64_t sequences;
  int heads, query_heads;
  int memories = 2;  // number of memories; 1: the memory of keys only; V is 0
  int D, V, M, chunk;
  TrellisMap phi, f;
  InputTensor<3> q, k, v, a;                  // [N, HQ, D], [N, H, D], [N, H, V], [N, H, M]
  InputTensor<2> weight;                      // weight of phi, [H, M], optional; needs one memory
  InputTensor<2> gamma, g;                    // [N, H], g optional
  OutputTensor<4> chunk_start[2], memory[2];  // [N, H, M, X] fp32
  int64_t* position;                          // [N]
  OutputTensor<3> o;                          // [N, HQ, V or M]
};
cudaError_t trellis_step(const TrellisStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

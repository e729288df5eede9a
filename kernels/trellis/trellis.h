// Trellis: two memories A [M, X] that compress vectors x_t onto targets a_t, one of keys, one of values.
//
//     z_t = A' x_t        u_t = J_phi(z_t)^T (phi(z_t) - a_t)        A_t = e^{g_t} A_{t-1} - gamma_t u_t
//     of keys, of M slots by D    x_t = k_t    r_t = f(A_t q_t)
//     of values, M by V           x_t = v_t    o_t = A_t^T r_t
//
// A' is the memory at the start of the chunk. No memory's update needs the other, nor a read, to go on.
// TTT has the memory of keys alone, and its output is r [M].
// Forward:
//   scan      both memories from chunk to chunk, in order, and both reads; for backward it keeps u, z and the
//             memory before every chunk
//   output    where blocks cannot reach each other's shared memory, the reads, every chunk by itself
// and backward, with what forward kept:
//   rows      every chunk by itself: r, dr, dy and dq
//   reverse   the memories' gradients from chunk to chunk, from the end: du and dz, and beside them -J du,
//             dk, dv, dgamma and what dg is a sum of
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "time/chunks.h"

namespace girih::kernels {

constexpr int kTrellisWidest = 128;  // M, D and V

// phi and f: silu or not, then one of these.
enum class Norm : int { none, l2, layer, softmax };
struct TrellisMap {
  bool silu;
  Norm norm;
};

// Rows of every 16-bit array start at 16 bytes: strides and widths are multiples of 8.
struct TrellisShape {
  ChunkGrid grid;
  int heads;         // H, of queries too
  int memories = 2;  // or 1, the memory of keys alone: V is 0, arrays of values are absent, and o is r
  int D, V, M;
  int slots;    // of M, those that exist: the rest is padding
  DType dtype;  // of q, k, v, a, o and the memories kept: fp16 or bf16
  TrellisMap phi, f;

  __host__ __device__ int width(int memory) const { return memory == 0 ? D : V; }
  __host__ __device__ int output_width() const { return memories == 1 ? M : V; }
};

// A memory as it is kept: a square tile of 16-bit elements, slots by columns, zeros beyond those that exist,
// as it lies in shared memory (SharedTile).
__host__ __device__ inline int trellis_tile(const TrellisShape& shape) {
  return shape.M <= 64 && shape.D <= 64 && shape.V <= 64 ? 64 : 128;
}

// Of a token, in units of log2: L_t, what its rounding has lost, and L_C - L_t; and gamma_t.
struct alignas(16) TokenGate {
  float through, lost, after, gamma;
};
struct TrellisGates {
  TrellisShape shape;
  In<3> gamma, g;     // [B, T, H], g optional
  TokenGate* tokens;  // [B, T, H]
};
cudaError_t trellis_gates(const TrellisGates& problem, cudaStream_t stream);

// Of each memory: 0 keys, 1 values. States are fp32 [N, H, M, X], any strides.
struct TrellisScan {
  TrellisShape shape;
  const TokenGate* gates;         // [B, T, H]
  In<4> x[2];                     // [B, T, H, X]
  In<4> a;                        // [B, T, H, M]
  const float* weight = nullptr;  // of phi, [H, M], optional: of one memory, and no softmax
  In<4> first[2];                 // A' of a sequence's first chunk; absent without positions: `initial`
  In<4> initial[2];               // A before the first token
  Out<4> last_first[2];           // A' of the chunk that the next token is in
  Out<4> last[2];                 // A after the last token
  int64_t* last_position;         // [N]
  In<4> q;                        // [B, T, H, D]
  Out<4> o;                       // [B, T, H, V or M], if trellis_scan_reads(); else absent
  // For backward and trellis_output(), optional: u and z, [B, T, H, M] in dtype, z's Fit (maps.cuh), [B, T,
  // H, 4] in fp32, with a weight its WeightFit behind it, [B, T, H, 8], and A before every chunk,
  // [chunk_count, H] of tiles.
  Out<4> u[2], z[2], fit[2];
  void* memories[2];
};
cudaError_t trellis_scan(const TrellisScan& problem, cudaStream_t stream);
// Whether it can read too on the current device: of two memories where there are clusters.
cudaError_t trellis_scan_reads(const TrellisShape& shape, bool& reads);

// Of two memories.
struct TrellisOutput {
  TrellisShape shape;
  const TokenGate* gates;
  In<4> q;  // [B, T, H, D]
  In<4> x[2], u[2];
  const void* memories[2];
  Out<4> o;  // [B, T, H, V]
};
cudaError_t trellis_output(const TrellisOutput& problem, cudaStream_t stream);

// A read is l_t^T A_t w_t of either memory: (l, w) = (dy, q) of keys and (r, do) of values. Of one memory dr
// is do, and r is not stored.
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
  const float* weight = nullptr;  // as the scan's
  float* dweight = nullptr;       // [N, H, M], there with a weight: of a sequence each
  In<4> first[2];
  const void* memories[2];
  In<4> dlast_first[2], dlast[2];  // fp32 [N, H, M, X], optional: zero
  Out<4> dfirst[2];                // fp32 [N, H, M, X], there with positions
  Out<4> dinitial[2];              // fp32 [N, H, M, X]
  Out<4> da[2];                    // [B, T, H, M], dtype: of either memory; da is their sum
  Out<4> dx[2];                    // [B, T, H, X]
  float* dgammas;                  // [memories, B, T, H]
  float* dL;  // [memories, tiles of a chunk, B, T, H], optional: parts of a sum, gates.cu
};
cudaError_t trellis_reverse(const TrellisReverse& problem, cudaStream_t stream);

struct TrellisGateGradients {
  TrellisShape shape;
  const float *dgammas, *dL;
  Out<3> dgamma, dg;  // [B, T, H] fp32, dg optional
};
cudaError_t trellis_gate_gradients(const TrellisGateGradients& problem, cudaStream_t stream);

// Whether the current device has the shared memory for these kernels.
cudaError_t trellis_fits(bool& fits);

// One token; any sizes, strides and types but fp64. The state is written in place.
struct TrellisStep {
  int64_t sequences;
  int heads, query_heads;
  int memories = 2;  // 1: V is 0
  int D, V, M, chunk;
  TrellisMap phi, f;
  In<3> q, k, v, a;            // [N, HQ, D], [N, H, D], [N, H, V], [N, H, M]
  In<2> weight;                // of phi, [H, M], optional, of one memory
  In<2> gamma, g;              // [N, H], g optional
  Out<4> first[2], memory[2];  // [N, H, M, X] fp32
  int64_t* position;           // [N]
  Out<3> o;                    // [N, HQ, V or M]
};
cudaError_t trellis_step(const TrellisStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

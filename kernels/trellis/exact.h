// Trellis on the plain fp32 cores: every product, sum and memory in fp32, no tf32. What the tensor-core
// kernels leave over: fp32 inputs, and slots, keys or values wider than theirs.
//
// Of either memory A [M, X], as in trellis.h, with s_t = -gamma_t u_t:
//
//     z_t = A' x_t        u_t = J_phi(z_t)^T (phi(z_t) - a_t)        A_t = e^{g_t} A_{t-1} + s_t x_t^T
//
// Only z needs the memory to go on: a scan makes z and s, in order, and with them everything is read as gsa's
// memories are, by all pieces of 64 tokens at once (exact/exact.h), from the memory before a piece:
//
//     y = value_read(q, k, s, A1)      r = f(y)      o = key_read(r, s, v, A2)
//
// Backward, with (l, w) = (dy, q) of keys and (r, do) of values, for which a read is l_t^T A_t w_t:
//
//     dr = value_read(do, v, s, A2)    dy = J_f(y)^T dr    dq = key_read(dy, s, k, A1)
//     G_t = l_t w_t^T + e^{g_{t+1}} G_{t+1},  and where a chunk ends dA' of the next one
//     ds_t = G_t x_t     du_t = -gamma_t ds_t     dgamma_t = -u_t.ds_t
//     dz_t = H du_t      da_t = -J du_t           H: the Hessian of |phi(z_t) - a_t|^2 / 2
//     dA' = sum of dz_t x_t^T over the chunk
//     dx_t = G_t^T s_t + A'^T dz_t
//     dg_t = e^{g_t} G_t.A_{t-1}
//
// A weight w [M] of phi makes of the loss |w * phi(z_t) - a_t|^2 / 2: u_t = J_phi(z_t)^T (w * (w * phi(z_t) -
// a_t)), its Hessian is H, da_t = -w * J du_t, and dw is the sum of (2 w * phi(z_t) - a_t) * J du_t.
//
// ds, dz and G go from chunk to chunk, in order, from the end; dx and dg of all pieces at once, from A before
// and G after a piece.
//
// A head of queries reads the memories of its group: there is one of each a head of keys. Of one memory,
// TTT's, o is r, and dr is do.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "time/chunks.h"
#include "trellis/trellis.h"

namespace girih::kernels {

constexpr int kTrellisExactWidest = 256;  // M, D and V

struct TrellisExactShape {
  ChunkGrid grid;
  int heads, query_heads;  // H, and HQ, a multiple
  int memories = 2;        // or 1, the memory of keys alone: V is 0, and arrays of values are absent
  int D, V, M;             // as the caller's memories have them
  TrellisMap phi, f;

  __host__ __device__ int width(int memory) const { return memory == 0 ? D : V; }
};

// Rows of what the kernels write for one another, and for the reads, have so many columns: zeros from the
// width on.
__host__ __device__ inline int trellis_exact_packed(int width) { return (width + 7) / 8 * 8; }

// Of each memory: 0 keys, 1 values. Tensors of any strides and types. [.., M] in packs: fp32, with rows of
// trellis_exact_packed(M) columns side by side. States: [pieces of kChunk tokens, H, X, M] in packs both,
// columns of A the rows.
struct TrellisExactScan {
  TrellisExactShape shape;
  In<4> x[2];                     // [B, T, H, X]
  In<4> a;                        // [B, T, H, M]
  const float* weight = nullptr;  // of phi, [H, M] in packs, optional
  In<3> gamma, g;                 // [B, T, H], g optional
  In<4> first[2];    // A' of a sequence's first chunk, fp32 [N, H, M, X]; absent without positions: initial
  In<4> initial[2];  // A before the first token
  Out<4> last_first[2];    // A' of the chunk that the next token is in
  Out<4> last[2];          // A after the last token
  int64_t* last_position;  // [N]
  float* z[2];             // [B, T, H, M] in packs, optional
  float* s[2];             // [B, T, H, M] in packs
  float* states[2];        // A before every piece
};
cudaError_t trellis_exact_scan(const TrellisExactScan& problem, cudaStream_t stream);

// y becomes r = f(y), and with it dr becomes dy = J_f(y)^T dr.
struct TrellisExactRows {
  int64_t rows;
  int M;
  TrellisMap f;
  float* y;         // [rows, M] in packs
  float* dr;        // the same, optional
  float* reads[2];  // [rows], with dr: y.dy and, optional, r.dr
};
cudaError_t trellis_exact_rows(const TrellisExactRows& problem, cudaStream_t stream);

struct TrellisExactReverse {
  TrellisExactShape shape;
  In<4> x[2], a;
  const float* weight = nullptr;
  In<3> gamma, g;
  In<4> l[2], w[2];                // [B, T, HQ, M], [B, T, HQ, X]
  const float* z[2];               // of the scan
  In<4> dlast_first[2], dlast[2];  // fp32 [N, H, M, X], optional: zero
  Out<4> dfirst[2];                // fp32 [N, H, M, X], there with positions
  Out<4> dinitial[2];              // fp32 [N, H, M, X]
  float *dz[2], *da[2];            // [B, T, H, M] in packs; da is the sum over both memories
  float* dweight = nullptr;  // [B, T, H, M] in packs, there with a weight, of one memory: each token's part
  float* gradients[2];       // states: G after every piece
  float* dgamma;             // [memories, B, T, H]: of each
  float* started;            // [memories, B, T, H]: z.dz
};
cudaError_t trellis_exact_reverse(const TrellisExactReverse& problem, cudaStream_t stream);

struct TrellisExactColumns {
  TrellisExactShape shape;
  In<4> x[2];
  In<3> gamma, g;
  In<4> first[2], dlast_first[2];
  In<4> l[2], w[2];
  const float *s[2], *dz[2], *states[2], *gradients[2];
  const float *reads, *dgamma, *started;  // reads [memories, B, T, HQ]
  float* dx[2];                           // [B, T, H, X] in packs
  float* dg;                              // [memories, B, T, H], there with g: of each
};
cudaError_t trellis_exact_columns(const TrellisExactColumns& problem, cudaStream_t stream);

// Whether the current device has the shared memory for these kernels.
cudaError_t trellis_exact_fits(const TrellisExactShape& shape, bool& fits);

}  // namespace girih::kernels

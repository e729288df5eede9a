// Trellis in fp32 on the CUDA cores: all products, sums and memories are fp32, without tf32. For fp32 inputs,
// and for widths that the tensor-core kernels do not support.
//
// For either memory A [M, X], as in trellis.h, with s_t = -gamma_t u_t:
//
//     z_t = A' x_t        u_t = J_phi(z_t)^T (phi(z_t) - a_t)        A_t = e^{g_t} A_{t-1} + s_t x_t^T
//
// Only z depends on the memory: the scan computes z and s in order. All segments of 64 tokens are then read
// in parallel, from the memory before each segment, by the functions of gsa (exact/exact.h):
//
//     y = value_read(q, k, s, A1)      r = f(y)      o = key_read(r, s, v, A2)
//
// Backward, where a read is l_t^T A_t w_t with (l, w) = (dy, q) for keys and (r, do) for values:
//
//     dr = value_read(do, v, s, A2)    dy = J_f(y)^T dr    dq = key_read(dy, s, k, A1)
//     G_t = l_t w_t^T + e^{g_{t+1}} G_{t+1},  plus dA' of the next chunk if t ends a chunk
//     ds_t = G_t x_t     du_t = -gamma_t ds_t     dgamma_t = -u_t.ds_t
//     dz_t = H du_t      da_t = -J du_t           H: the Hessian of |phi(z_t) - a_t|^2 / 2
//     dA' = sum of dz_t x_t^T over the chunk
//     dx_t = G_t^T s_t + A'^T dz_t
//     dg_t = e^{g_t} G_t.A_{t-1}
//
// With a weight w [M] of phi the loss is |w * phi(z_t) - a_t|^2 / 2, and H is its Hessian: u_t = J_phi(z_t)^T
// (w * (w * phi(z_t) - a_t)), da_t = -w * J du_t, and dw is the sum of (2 w * phi(z_t) - a_t) * J du_t.
//
// The reverse scan computes ds, dz and G chunk by chunk, from the end. dx and dg of all segments are computed
// in parallel, from A before and G after each segment.
//
// Each head of k has its memories; which serve a group of query heads. With one memory (TTT) o is r, and dr
// is do.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "time/chunks.h"
#include "trellis/trellis.h"

namespace girih::kernels {

constexpr int kTrellisExactWidest = 256;  // M, D and V

struct TrellisExactShape {
  ChunkGrid grid;
  int heads, query_heads;  // H, and HQ, a multiple of H
  int memories = 2;        // 1: the memory of keys only; V is 0, and arrays of values are absent
  int D, V, M;             // without padding
  TrellisMap phi, f;

  __host__ __device__ int width(int memory) const { return memory == 0 ? D : V; }
};

// Row length of tensors that the kernels exchange: `width` rounded up to 8 columns. The padding is 0.
__host__ __device__ inline int trellis_exact_packed(int width) { return (width + 7) / 8 * 8; }

// Arrays of two have an entry for each memory: 0 keys, 1 values. In<> and Out<> have any strides and types.
// "[.., M] padded" is contiguous fp32 with rows of trellis_exact_packed(M) columns. Stored states are A^T:
// [segments of kChunk tokens, H, X, M], with both X and M padded.
struct TrellisExactScan {
  TrellisExactShape shape;
  In<4> x[2];                     // [B, T, H, X]
  In<4> a;                        // [B, T, H, M]
  const float* weight = nullptr;  // weight of phi, [H, M] padded, optional
  In<3> gamma, g;                 // [B, T, H], g optional
  // A' of the chunk in which a sequence starts, fp32 [N, H, M, X]; absent without positions, then A' is
  // initial
  In<4> first[2];
  In<4> initial[2];        // A before token 0
  Out<4> last_first[2];    // A' of the chunk of the next token
  Out<4> last[2];          // A after the last token
  int64_t* last_position;  // [N]
  float* z[2];             // [B, T, H, M] padded, optional
  float* s[2];             // [B, T, H, M] padded
  float* states[2];        // A before every segment
};
cudaError_t trellis_exact_scan(const TrellisExactScan& problem, cudaStream_t stream);

// Replaces y by r = f(y) and, if present, dr by dy = J_f(y)^T dr.
struct TrellisExactRows {
  int64_t rows;
  int M;
  TrellisMap f;
  float* y;         // [rows, M] padded
  float* dr;        // [rows, M] padded, optional
  float* reads[2];  // [rows], present if dr is: y.dy and, optional, r.dr
};
cudaError_t trellis_exact_rows(const TrellisExactRows& problem, cudaStream_t stream);

struct TrellisExactReverse {
  TrellisExactShape shape;
  In<4> x[2], a;
  const float* weight = nullptr;
  In<3> gamma, g;
  In<4> l[2], w[2];                // [B, T, HQ, M], [B, T, HQ, X]
  const float* z[2];               // z that the scan stores
  In<4> dlast_first[2], dlast[2];  // fp32 [N, H, M, X]; absent: zero
  Out<4> dfirst[2];                // fp32 [N, H, M, X], present if there are positions
  Out<4> dinitial[2];              // fp32 [N, H, M, X]
  float *dz[2], *da[2];            // [B, T, H, M] padded; da is the sum over the memories
  // [B, T, H, M] padded, the term of each token; present if there is a weight, which needs one memory
  float* dweight = nullptr;
  float* gradients[2];  // like states: G after every segment
  float* dgamma;        // [memories, B, T, H]; dgamma is the sum over the memories
  float* started;       // [memories, B, T, H]: z.dz
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
  float* dx[2];                           // [B, T, H, X] padded
  // [memories, B, T, H], present if g is; dg is the sum over the memories
  float* dg;
};
cudaError_t trellis_exact_columns(const TrellisExactColumns& problem, cudaStream_t stream);

// Whether the current device has enough shared memory for these kernels.
cudaError_t trellis_exact_fits(const TrellisExactShape& shape, bool& fits);

}  // namespace girih::kernels

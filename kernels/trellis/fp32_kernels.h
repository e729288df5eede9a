// The kernels of Trellis in fp32 on the CUDA cores, which fp32_plan.cu launches: all products, sums and
// memories are fp32, without tf32. For fp32 inputs, and for widths that the tensor-core kernels do not
// support.
//
// For either memory A [M, X], as in trellis.h, with s_t = -gamma_t u_t:
//
//     z_t = A' x_t        u_t = J_phi(z_t)^T (phi(z_t) - a_t)        A_t = e^{g_t} A_{t-1} + s_t x_t^T
//
// Only z depends on the memory: the scan computes z and s in order. All segments of 64 tokens are then read
// in parallel, from the memory before each segment, by the functions of gsa (fp32/fp32.h):
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
// Each head of k has its memories, which serve a group of HQ / H query heads. With one memory (TTT) o is r,
// and dr is do.
#pragma once

#include "trellis/trellis.h"

namespace girih::kernels {

// Arrays of two have an entry for each memory, by MemoryIndex. InputTensor<> and OutputTensor<> have any
// strides and types.
// "[.., M] padded" is contiguous fp32 with rows of trellis_fp32_padded_width(M) columns. Stored states are
// A^T: [segments of kChunk tokens, H, X, M], with both X and M padded.
struct TrellisFp32Scan {
  TrellisFp32Shape shape;
  InputTensor<4> x[2];            // [B, T, H, X]
  InputTensor<4> a;               // [B, T, H, M]
  const float* weight = nullptr;  // weight of phi, [H, M] padded, optional
  InputTensor<3> gamma, g;        // [B, T, H], g optional
  // A' of the chunk in which a sequence starts, fp32 [N, H, M, X]; absent without positions, then A' is
  // initial
  InputTensor<4> chunk_start[2];
  InputTensor<4> initial[2];            // A before token 0
  OutputTensor<4> last_chunk_start[2];  // A' of the chunk of the next token
  OutputTensor<4> last[2];              // A after the last token
  int64_t* last_position;               // [N]
  float* z[2];                          // [B, T, H, M] padded, optional
  float* s[2];                          // [B, T, H, M] padded
  float* states[2];                     // A before every segment
};
cudaError_t trellis_fp32_scan(const TrellisFp32Scan& problem, cudaStream_t stream);

// A tensor [B, T, heads, width] with padded rows, which the kernels exchange.
__host__ __device__ inline InputTensor<4> padded_rows(const float* data, const SequenceLayout& tokens,
                                                      int heads, int width) {
  const int64_t row = trellis_fp32_padded_width(width);
  return {data, DType::f32, {tokens.tokens * heads * row, heads * row, row, 1}};
}

// Replaces y by r = f(y) and, if present, dr by dy = J_f(y)^T dr.
struct TrellisFp32ReadMap {
  int64_t rows;
  int M;
  TrellisMap f;
  float* y;             // [rows, M] padded
  float* dr;            // [rows, M] padded, optional
  float* read_dots[2];  // [rows], present if dr is: y.dy and, optional, r.dr
};
cudaError_t trellis_fp32_read_map(const TrellisFp32ReadMap& problem, cudaStream_t stream);

struct TrellisFp32Reverse {
  TrellisFp32Shape shape;
  InputTensor<4> x[2], a;
  const float* weight = nullptr;
  InputTensor<3> gamma, g;
  InputTensor<4> l[2], w[2];                      // [B, T, HQ, M], [B, T, HQ, X]
  const float* z[2];                              // z that the scan stores
  InputTensor<4> dlast_chunk_start[2], dlast[2];  // fp32 [N, H, M, X]; absent: zero
  OutputTensor<4> dchunk_start[2];                // fp32 [N, H, M, X], present if there are positions
  OutputTensor<4> dinitial[2];                    // fp32 [N, H, M, X]
  float *dz[2], *da[2];                           // [B, T, H, M] padded; da is the sum over the memories
  // [B, T, H, M] padded, the term of each token; present if there is a weight, which needs one memory
  float* dweight = nullptr;
  float* gradients[2];  // like states: G after every segment
  float* dgamma;        // [memories, B, T, H]; dgamma is the sum over the memories
  float* dz_dot_z;      // [memories, B, T, H]: z.dz
};
cudaError_t trellis_fp32_reverse(const TrellisFp32Reverse& problem, cudaStream_t stream);

struct TrellisFp32Dkv {
  TrellisFp32Shape shape;
  InputTensor<4> x[2];
  InputTensor<3> gamma, g;
  InputTensor<4> chunk_start[2], dlast_chunk_start[2];
  InputTensor<4> l[2], w[2];
  const float *s[2], *dz[2], *states[2], *gradients[2];
  const float* read_dots;          // [memories, B, T, HQ]: l.(A w) of every read
  const float *dgamma, *dz_dot_z;  // of TrellisFp32Reverse
  float* dx[2];                    // [B, T, H, X] padded
  // [memories, B, T, H], present if g is; dg is the sum over the memories
  float* dg;
};
cudaError_t trellis_fp32_dkv(const TrellisFp32Dkv& problem, cudaStream_t stream);

}  // namespace girih::kernels

// Lattice: a memory S [D, M] whose columns s_i have unit length and move in their tangent spaces. With (h, c)
// of the objective, e = S k - v or S^T v - k:
//
//     decode      h = e,  c = k          encode  h = v, c = e          similarity  h = -v, c = k
//     d_{t,i} = -gamma_t c_{t,i} (h_t - s_i (s_i.h_t))
//     X_t = e^{g_t} X_{t-1} + d_t          X = S where a chunk begins, S <- unit(X) where it ends
//     o_t = unit(X_t) q_t
//
// The updates of a chunk depend only on S at its start. Forward:
//     scan      updates the memory chunk by chunk; stores the memory before every chunk
//     read      computes o of all chunks in parallel
// Backward, from the memories that forward stores:
//     read backward    computes dq and the terms of the reads in all other gradients, of all chunks in
//     parallel reverse          computes the gradient of the memory chunk by chunk, from the end dkv adds the
//     terms of the memory after a chunk to dk, dv, dgamma and dg, all chunks in parallel
// A chunk is short if it has at most 16 tokens. The `short` kernels are for short chunks and for D and M of
// at most 64: scan and read are one kernel, and so are reverse and dkv.
//
// All kernels store a memory as S^T: the vectors s_i are the rows of a tile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "time/chunks.h"

namespace girih::kernels {

constexpr int kLatticeMaxWidth = 128;  // D and M

enum class LatticeObjective : int { decode, encode, similarity };

// Rows of every 16-bit array start at 16 bytes: strides and widths are multiples of 8.
struct LatticeShape {
  ChunkGrid grid;
  int heads;        // H, heads of the memory
  int query_heads;  // HQ, a multiple of H
  int D, M;
  DType dtype;  // dtype of q, k, v, o and of the stored memories: fp16 or bf16
  LatticeObjective objective;
};

// State of a sequence in fp32, any strides. Without positions, `step` and `decay` of the start are absent:
// every sequence starts with a new chunk.
struct LatticeStart {
  InputTensor<4> memory;  // [N, H, D, M]: S of the chunk of the next token
  InputTensor<4> step;    // [N, H, D, M]: Delta, the steps of that chunk so far
  InputTensor<2> decay;   // [N, H], optional: the sum of that chunk's gates so far
};
struct LatticeEnd {
  OutputTensor<4> memory, step;  // step optional: zero if every chunk is complete
  OutputTensor<2> decay;         // optional
};

struct LatticeScan {
  LatticeShape shape;
  InputTensor<4> k, v;      // [B, T, H, M], [B, T, H, D]
  InputTensor<3> gamma, g;  // [B, T, H], g optional
  LatticeStart start;
  LatticeEnd end;
  int64_t* last_position;  // [N], optional
  void* memories;          // dtype [chunk_count, H, M, D]: S^T before every chunk
  float* ends;             // [chunk_count, H, 2, M]: alpha and rho of every chunk (scan.cuh)
};

struct LatticeRead {
  LatticeShape shape;
  InputTensor<4> q, k, v;  // [B, T, HQ, M], and k and v of LatticeScan
  InputTensor<3> gamma, g;
  LatticeStart start;
  const void* memories;
  OutputTensor<4> o;  // [B, T, HQ, D]
};
cudaError_t lattice_forward(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream);
// Whether scan and read are one kernel on the current device. Then `memories` and `ends` are needed for
// backward only, and may be null.
cudaError_t lattice_uses_short_scan(const LatticeShape& shape, bool& is);

struct LatticeReadBackward {
  LatticeShape shape;
  InputTensor<4> q, k, v;
  InputTensor<3> gamma, g;
  LatticeStart start;
  const void* memories;
  InputTensor<4> dout;     // [B, T, HQ, D]
  OutputTensor<4> dq;      // [B, T, HQ, M]
  OutputTensor<4> dk, dv;  // [B, T, H, ...], terms of the reads
  OutputTensor<3> dgamma;  // [B, T, H] fp32, terms of the reads
  // [B, T, H] fp32, present if g is: the gradient of the decay of rows whose n is at its floor
  OutputTensor<3> ddecay_at_floor;
  void* gradients;  // dtype [chunk_count, H, M, D]: gradient of S^T, terms of the reads
  // [N, H, D, M] fp32, present if there are positions: gradient of Delta, terms of the reads
  OutputTensor<4> dstep;
  OutputTensor<2> ddecay;  // [N, H] fp32, present if there are positions and g: terms of the reads
};
cudaError_t lattice_read_backward(const LatticeReadBackward& problem, cudaStream_t stream);

struct LatticeReverse {
  LatticeShape shape;
  InputTensor<4> k, v;
  InputTensor<3> gamma, g;
  LatticeStart start;
  const void* memories;
  float* ends;                     // of LatticeScan; with g, replaced by the values that dkv.cuh needs for dg
  InputTensor<4> last, last_step;  // state after the scan, [N, H, D, M] fp32; last_step optional
  InputTensor<4> dlast, dlast_step;  // [N, H, D, M] fp32; absent: zero
  InputTensor<2> dlast_decay;        // [N, H] fp32; absent: zero
  // of LatticeReadBackward; replaced by the gradient of X^T at the end of every chunk, tangent at S
  void* gradients;
  OutputTensor<4> dmemory;  // [N, H, D, M] fp32, tangent at S
  OutputTensor<4> dstep;    // of LatticeReadBackward, present if there are positions
  OutputTensor<2> ddecay;   // of LatticeReadBackward, present if there are positions and g
  OutputTensor<2>
      dend_decay;  // [N, H] fp32, present if g is: gradient of the decay at the end of an incomplete chunk
};

struct LatticeDkv {
  LatticeShape shape;
  InputTensor<4> k, v;
  InputTensor<3> gamma, g;
  const void *memories, *gradients;  // of LatticeReverse
  const float* ends;                 // of LatticeReverse, present if g is
  InputTensor<3> ddecay_at_floor;    // of LatticeReadBackward
  InputTensor<2> dend_decay;         // of LatticeReverse
  OutputTensor<4> dk, dv;  // of LatticeReadBackward; the kernel completes dk, dv and dgamma in place
  OutputTensor<3> dgamma;
  OutputTensor<3> dg;  // [B, T, H] fp32, optional
};
// If both are one kernel, `gradients` keeps the terms of the reads.
cudaError_t lattice_reverse(const LatticeReverse& problem, const LatticeDkv& dkv, cudaStream_t stream);

// Whether the current device has enough shared memory for these kernels.
cudaError_t lattice_fits(const LatticeShape& shape, bool& fits);

// One token; any strides, any types but fp64, any sizes whose vectors fit in shared memory. The state is
// updated in place.
struct LatticeStep {
  int64_t sequences;
  int heads, query_heads;
  int D, M, chunk;
  LatticeObjective objective;
  InputTensor<3> q, k, v;   // [N, HQ, M], [N, H, M], [N, H, D]
  InputTensor<2> gamma, g;  // [N, H], g optional
  OutputTensor<4> memory;   // [N, H, D, M] fp32
  OutputTensor<4> step;     // [N, H, D, M] fp32, absent for chunks of one token
  OutputTensor<2> decay;    // [N, H] fp32, present if g is and chunks have more than one token
  const int64_t* position;  // [N], absent for chunks of one token
  int64_t* next_position;   // [N], another array than `position`, which blocks of other heads may still read
  OutputTensor<3> o;        // [N, HQ, D]
};
cudaError_t lattice_step(const LatticeStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

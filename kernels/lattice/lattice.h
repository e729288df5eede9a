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
//     read backward    computes dq and the terms of the reads in all other gradients; all chunks in parallel
//     reverse          computes the gradient of the memory chunk by chunk, from the end
//     dkv              adds the terms of the memory after a chunk to dk, dv, dgamma and dg; all chunks in
//                      parallel
// A chunk is short if it has at most 16 tokens. The `short` kernels are for short chunks and for D and M of
// at most 64: scan and read are one kernel, and so are reverse and dkv.
//
// All kernels store a memory as S^T: the vectors s_i are the rows of a tile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/workspace.h"
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

// The inputs of a call.
struct LatticeInputs {
  LatticeShape shape;
  InputTensor<4> q, k, v;   // [B, T, HQ, M], [B, T, H, M], [B, T, H, D]
  InputTensor<3> gamma, g;  // [B, T, H], g optional
  LatticeStart start;
};

struct LatticeForward {
  LatticeInputs inputs;
  LatticeEnd end;
  int64_t* last_position;  // [N], optional
  // Saved for backward, both present or both null:
  void* memories;     // dtype [chunk_count, H, M, D]: S^T before every chunk
  float* ends;        // [chunk_count, H, 2, M]: alpha and rho of every chunk (scan.cuh)
  OutputTensor<4> o;  // [B, T, HQ, D]
};
cudaError_t lattice_forward(const LatticeForward& call, Workspace& workspace, cudaStream_t stream);

struct LatticeBackward {
  LatticeInputs inputs;
  const void* memories;              // of LatticeForward
  const float* ends;                 // of LatticeForward
  InputTensor<4> last, last_step;    // of LatticeForward: the final state, [N, H, D, M] fp32
  InputTensor<4> dout;               // [B, T, HQ, D]
  InputTensor<4> dlast, dlast_step;  // [N, H, D, M] fp32; absent: zero
  InputTensor<2> dlast_decay;        // [N, H] fp32; absent: zero
  OutputTensor<4> dq, dk, dv;        // shapes of q, k, v
  OutputTensor<3> dgamma, dg;        // [B, T, H] fp32, dg present if g is
  OutputTensor<4> dmemory;           // [N, H, D, M] fp32, tangent at S
  OutputTensor<4> dstep;             // [N, H, D, M] fp32, present if there are positions
  OutputTensor<2> ddecay;            // [N, H] fp32, present if there are positions and g
};
cudaError_t lattice_backward(const LatticeBackward& call, Workspace& workspace, cudaStream_t stream);

// Whether the current device has enough shared memory for these kernels.
cudaError_t lattice_fits(const LatticeShape& shape, bool& fits);

// The calls in fp32 on the CUDA cores (fp32.h): fp32 inputs, chunks of fewer than 8 tokens, and the variants
// of chunks of one token.
constexpr int kLatticeSegment = 64;  // tokens, at most

struct LatticeFp32Shape {
  SequenceLayout tokens;
  const int64_t* position;  // see ChunkGrid
  int chunk;                // 1..kMaxChunk
  int heads, query_heads;   // H, and HQ, a multiple of H
  int D, M;                 // up to kLatticeMaxWidth
  LatticeObjective objective;
  bool normalize;   // without it, and with shrinkage, chunks have one token
  float shrinkage;  // lambda
};

// Segments are whole chunks.
__host__ __device__ inline int lattice_segment_tokens(int chunk) { return kLatticeSegment / chunk * chunk; }
__host__ __device__ inline ChunkGrid lattice_segment_grid(const LatticeFp32Shape& shape) {
  return {shape.tokens, lattice_segment_tokens(shape.chunk), shape.position};
}
// Columns of stored memories: M rounded up to packs of 16 bytes.
__host__ __device__ inline int lattice_stored_columns(const LatticeFp32Shape& shape) {
  return (shape.M + 3) / 4 * 4;
}

// Any strides and types. Without positions, `step` and `decay` of the start are not used.
struct LatticeFp32Inputs {
  LatticeFp32Shape shape;
  InputTensor<4> q, k, v;   // [B, T, HQ, M], [B, T, H, M], [B, T, H, D]
  InputTensor<3> gamma, g;  // [B, T, H], g optional
  LatticeStart start;
};

struct LatticeFp32Forward {
  LatticeFp32Inputs inputs;
  LatticeEnd end;
  int64_t* last_position;  // [N]
  // Saved for backward, optional: [segments, H, D, lattice_stored_columns()], S before every segment.
  float* memories;
  OutputTensor<4> o;  // [B, T, HQ, D]
};
cudaError_t lattice_fp32_forward(const LatticeFp32Forward& call, cudaStream_t stream);

struct LatticeFp32Backward {
  LatticeFp32Inputs inputs;
  const float* memories;             // of LatticeFp32Forward
  InputTensor<4> dout;               // [B, T, HQ, D]; absent: zero
  InputTensor<4> dlast, dlast_step;  // [N, H, D, M]; absent: zero
  InputTensor<2> dlast_decay;        // [N, H]; absent: zero
  OutputTensor<4> dq, dk, dv;        // shapes of q, k, v
  OutputTensor<3> dgamma, dg;        // [B, T, H], dg optional
  // [N, H, D, M]; with normalisation dmemory is tangent; dstep is present if there are positions
  OutputTensor<4> dmemory, dstep;
  OutputTensor<2> ddecay;  // [N, H], present if there are positions and g
};
cudaError_t lattice_fp32_backward(const LatticeFp32Backward& call, Workspace& workspace, cudaStream_t stream);

// Whether the current device has enough shared memory for forward and backward.
cudaError_t lattice_fp32_fits(const LatticeFp32Shape& shape, bool& fits);

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

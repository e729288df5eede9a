// Lattice: a memory S [D, M] whose columns s_i keep unit length and step in their tangent spaces. With (h, c)
// from the objective, e = S k - v or S^T v - k:
//
//     decode      h = e,  c = k          encode  h = v, c = e          similarity  h = -v, c = k
//     d_{t,i} = -gamma_t c_{t,i} (h_t - s_i (s_i.h_t))
//     X_t = e^{g_t} X_{t-1} + d_t          X = S where a chunk begins, S <- unit(X) where it ends
//     o_t = unit(X_t) q_t
//
// A chunk reads S at its start alone, so forward is two parts:
//   scan      the memory from chunk to chunk, in order; writes the one before every chunk
//   read      every chunk by itself: o
// and backward three, with the memories that forward kept:
//   reads     every chunk: dq, and of all other gradients what the chunk's own reads give
//   reverse   the memory's gradient from chunk to chunk, from the end
//   columns   every chunk: dk, dv, dgamma, dg are completed by what the memory after the chunk gives
// Each is a kernel, but of short chunks and small memories the first two are one, and the last two.
//
// In all of them a memory lies as S^T, its vectors s_i the rows of a tile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "time/chunks.h"

namespace girih::kernels {

constexpr int kLatticeWidest = 128;  // D and M

enum class LatticeObjective : int { decode, encode, similarity };

// Rows of every 16-bit array start at 16 bytes: strides and widths are multiples of 8.
struct LatticeShape {
  ChunkGrid grid;
  int heads;        // H, the memories'
  int query_heads;  // HQ, a multiple of H
  int D, M;
  DType dtype;  // of q, k, v, o and the memories kept: fp16 or bf16
  LatticeObjective objective;
};

// Where a sequence stands, fp32, any strides. Without positions `step` and `decay` are absent from what a
// call begins with: every sequence begins with a chunk.
struct LatticeStart {
  In<4> memory;  // [N, H, D, M]: S of the chunk that the first token is in
  In<4> step;    // [N, H, D, M]: Delta, the steps that the chunk has accumulated
  In<2> decay;   // [N, H], optional: the sum of the chunk's gates so far
};
struct LatticeEnd {
  Out<4> memory, step;  // step optional: zero where every chunk is complete
  Out<2> decay;         // optional
};

struct LatticeScan {
  LatticeShape shape;
  In<4> k, v;      // [B, T, H, M], [B, T, H, D]
  In<3> gamma, g;  // [B, T, H], g optional
  LatticeStart start;
  LatticeEnd end;
  int64_t* last_position;  // [N], optional
  void* memories;          // dtype [chunk_count, H, M, D]: S^T before every chunk
  float* ends;             // [chunk_count, H, 2, M]: alpha and rho of the chunk's end, see scan.cuh
};

struct LatticeRead {
  LatticeShape shape;
  In<4> q, k, v;  // [B, T, HQ, M]
  In<3> gamma, g;
  LatticeStart start;
  const void* memories;
  Out<4> o;  // [B, T, HQ, D]
};
cudaError_t lattice_forward(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream);
// Whether both are one kernel on the current device. `memories` and `ends` are then for backward alone, and
// both may be null.
cudaError_t lattice_is_short(const LatticeShape& shape, bool& is);

struct LatticeReads {
  LatticeShape shape;
  In<4> q, k, v;
  In<3> gamma, g;
  LatticeStart start;
  const void* memories;
  In<4> dout;       // [B, T, HQ, D]
  Out<4> dq;        // [B, T, HQ, M]
  Out<4> dk, dv;    // [B, T, H, ...], the reads' part
  Out<3> dgamma;    // [B, T, H] fp32, the reads' part
  Out<3> at_floor;  // [B, T, H] fp32, there with g: what a row's own decay gets where n is at its floor
  void* gradients;  // dtype [chunk_count, H, M, D]: of S^T, the reads' part
  Out<4> dstep;     // [N, H, D, M] fp32, there with positions: of Delta, the reads' part
  Out<2> ddecay;    // [N, H] fp32, there with positions and g: the reads' part
};
cudaError_t lattice_reads(const LatticeReads& problem, cudaStream_t stream);

struct LatticeReverse {
  LatticeShape shape;
  In<4> k, v;
  In<3> gamma, g;
  LatticeStart start;
  const void* memories;
  float* ends;              // of LatticeScan; with g becomes what gates of columns.cuh need
  In<4> last, last_step;    // what the scan left, [N, H, D, M] fp32; last_step optional
  In<4> dlast, dlast_step;  // [N, H, D, M] fp32, optional: zero
  In<2> dlast_decay;        // [N, H] fp32, optional: zero
  void* gradients;          // of LatticeReads; becomes the gradient of X^T at every chunk's end, tangent at S
  Out<4> dmemory;           // [N, H, D, M] fp32, tangent at S
  Out<4> dstep;             // of LatticeReads, there with positions
  Out<2> ddecay;            // of LatticeReads, there with positions and g
  Out<2> dopen;  // [N, H] fp32, there with g: of the decay of the end of a chunk that is not complete
};

struct LatticeColumns {
  LatticeShape shape;
  In<4> k, v;
  In<3> gamma, g;
  const void *memories, *gradients;  // of LatticeReverse
  const float* ends;                 // of LatticeReverse, there with g
  In<3> at_floor;                    // of LatticeReads
  In<2> dopen;                       // of LatticeReverse
  Out<4> dk, dv;                     // of LatticeReads: they and dgamma are completed in place
  Out<3> dgamma;
  Out<3> dg;  // [B, T, H] fp32, optional
};
// Where both are one kernel `gradients` stays of the reads.
cudaError_t lattice_reverse(const LatticeReverse& problem, const LatticeColumns& columns,
                            cudaStream_t stream);

// Whether the current device has the shared memory for these kernels.
cudaError_t lattice_fits(const LatticeShape& shape, bool& fits);

// One token; any sizes whose vectors have room in shared memory, strides and types but fp64. The state is
// written in place.
struct LatticeStep {
  int64_t sequences;
  int heads, query_heads;
  int D, M, chunk;
  LatticeObjective objective;
  In<3> q, k, v;            // [N, HQ, M], [N, H, M], [N, H, D]
  In<2> gamma, g;           // [N, H], g optional
  Out<4> memory;            // [N, H, D, M] fp32
  Out<4> step;              // [N, H, D, M] fp32, absent where a chunk is one token
  Out<2> decay;             // [N, H] fp32, there with g where a chunk is more than one token
  const int64_t* position;  // [N], absent where a chunk is one token
  int64_t* next_position;   // [N], not `position`: heads of a sequence do not wait for one another
  Out<3> o;                 // [N, HQ, D]
};
cudaError_t lattice_step(const LatticeStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

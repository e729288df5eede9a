// Trellis: two memories A [M, X], one of keys and one of values, that compress vectors x_t onto targets a_t.
//
//     z_t = A' x_t      u_t = J_phi(z_t)^T (phi(z_t) - a_t)      A_t = e^{g_t} A_{t-1} - gamma_t u_t x_t^T
//     memory of keys [M, D]      x_t = k_t    r_t = f(A_t q_t)
//     memory of values [M, V]    x_t = v_t    o_t = A_t^T r_t
//
// A' is the memory at the start of the chunk. The update of a memory depends neither on the other memory nor
// on a read. TTT has the memory of keys only, and its output is r [M].
//
// The tensor cores serve 16-bit elements and widths up to 128; kernels.h describes the kernels. The fp32 path
// serves the other calls; fp32_kernels.h has its equations. A plan function launches the kernels of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/workspace.h"
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

// Statistics of a row of z: MapStats, with a weight of phi followed by WeightedMapStats (maps.cuh).
constexpr int trellis_row_stats_width(bool has_weight) { return has_weight ? 8 : 4; }

// Width of the square tile [slots, columns] that stores a memory in 16 bits, in the layout of SharedTile.
// Padding is 0.
__host__ __device__ inline int trellis_tile_width(const TrellisShape& shape) {
  return shape.M <= 64 && shape.D <= 64 && shape.V <= 64 ? 64 : 128;
}

// The arguments that forward and backward of the tensor cores read. Arrays of two have an entry for each
// memory, by MemoryIndex. States are fp32 [N, H, slots, X] with any strides.
struct TrellisArguments {
  TrellisShape shape;
  InputTensor<4> q;         // [B, T, H, D]
  InputTensor<4> x[2];      // [B, T, H, X]
  InputTensor<4> a;         // [B, T, H, M]
  InputTensor<3> gamma, g;  // [B, T, H], g optional
  // weight of phi, [H, M], optional; needs one memory and a phi without softmax
  const float* weight = nullptr;
  // A' of the chunk in which a sequence starts, `initial` if the position is 0; absent without positions,
  // then A' is `initial`
  InputTensor<4> chunk_start[2];
};

struct TrellisForward : TrellisArguments {
  InputTensor<4> initial[2];            // A before token 0; absent: zero
  OutputTensor<4> last_chunk_start[2];  // A' of the chunk of the next token
  OutputTensor<4> last[2];              // A after the last token
  int64_t* last_position = nullptr;     // [N]
  OutputTensor<4> o;                    // [B, T, H, V or M]
  // Saved tensors, absent if backward does not run: u and z [B, T, H, M] in dtype; the statistics of the rows
  // of z, [B, T, H, trellis_row_stats_width()] in fp32; A before the first token of every chunk in this call,
  // [chunk_count, H, tile, tile] in dtype with trellis_tile_width().
  OutputTensor<4> u[2], z[2], row_stats[2];
  void* memories[2] = {};
};
cudaError_t trellis_forward(const TrellisForward& problem, Workspace& workspace, cudaStream_t stream);

// An absent gradient of a state is zero.
struct TrellisBackward : TrellisArguments {
  InputTensor<4> u[2], z[2], row_stats[2];  // saved tensors
  const void* memories[2] = {};
  InputTensor<4> dout;  // [B, T, H, V or M], dtype
  InputTensor<4> dlast_chunk_start[2], dlast[2];
  OutputTensor<4> dq;               // [B, T, H, D], dtype
  OutputTensor<4> dx[2];            // [B, T, H, X], dtype
  OutputTensor<4> da[2];            // [B, T, H, M], dtype, of each memory; da is the sum over the memories
  OutputTensor<3> dgamma, dg;       // [B, T, H] fp32, dg present if g is
  float* dweight = nullptr;         // [N, H, M], one row for each sequence; present if there is a weight
  OutputTensor<4> dchunk_start[2];  // present if there are positions
  OutputTensor<4> dinitial[2];
};
cudaError_t trellis_backward(const TrellisBackward& problem, Workspace& workspace, cudaStream_t stream);

// Whether the current device has enough shared memory for these kernels.
cudaError_t trellis_fits(bool& fits);

constexpr int kTrellisFp32MaxWidth = 256;  // M, D and V

struct TrellisFp32Shape {
  ChunkGrid grid;
  int heads, query_heads;  // H, and HQ, a multiple of H
  // number of memories; 1: the memory of keys only; V is 0, and arrays of values are absent
  int memories = 2;
  int D, V, M;  // without padding
  TrellisMap phi, f;

  __host__ __device__ int width(int memory) const { return memory == kKeyMemory ? D : V; }
};

// Row length of tensors that the kernels exchange: `width` rounded up to 8 columns. The padding is 0.
__host__ __device__ inline int trellis_fp32_padded_width(int width) { return (width + 7) / 8 * 8; }

// The arguments that forward and backward in fp32 read. Tensors have any strides and types, except where the
// comment says "padded": rows of trellis_fp32_padded_width() columns that start at multiples of 16 bytes. A
// pointer to float is contiguous fp32. States are fp32 [N, H, M, X] with any strides.
struct TrellisFp32Arguments {
  TrellisFp32Shape shape;
  InputTensor<4> q;               // [B, T, HQ, D] padded
  InputTensor<4> x[2];            // [B, T, H, X] padded
  InputTensor<4> a;               // [B, T, H, M]
  InputTensor<3> gamma, g;        // [B, T, H], g optional
  InputTensor<4> slot_gates;      // [B, T, H, M] padded, fp32: g of every slot; 0 without g
  const float* weight = nullptr;  // weight of phi, [H, M] padded, optional; needs one memory
  // A' of the chunk in which a sequence starts; absent without positions, then A' is initial
  InputTensor<4> chunk_start[2];
};

struct TrellisFp32Forward : TrellisFp32Arguments {
  InputTensor<4> initial[2];            // A before token 0
  OutputTensor<4> last_chunk_start[2];  // A' of the chunk of the next token
  OutputTensor<4> last[2];              // A after the last token
  int64_t* last_position = nullptr;     // [N]
  // [B, T, HQ, V] padded. With one memory [B, T, HQ, M] padded, contiguous fp32: the caller initialises the
  // rows of tokens outside of the sequences, and the plan replaces each of these rows by f of the row.
  OutputTensor<4> o;
  // Saved tensors, absent if backward does not run: z and s = -gamma u, [B, T, H, M] padded; A^T before every
  // segment of kChunk tokens, [token_range_count, H, X, M] with X and M padded.
  float *z[2] = {}, *s[2] = {}, *states[2] = {};
};
cudaError_t trellis_fp32_forward(const TrellisFp32Forward& problem, Workspace& workspace,
                                 cudaStream_t stream);

// An absent gradient of a state is zero.
struct TrellisFp32Backward : TrellisFp32Arguments {
  const float *z[2] = {}, *s[2] = {}, *states[2] = {};  // saved tensors
  InputTensor<4> dout;                                  // [B, T, HQ, V] padded; absent with one memory
  // With one memory dr [B, T, HQ, M] padded, the gradient of the output. The kernels replace dr by dy.
  float* dr = nullptr;
  InputTensor<4> dlast_chunk_start[2], dlast[2];
  OutputTensor<4> dq;        // [B, T, HQ, D] padded
  float* dx[2] = {};         // [B, T, H, X] padded
  float* da[2] = {};         // [B, T, H, M] padded, of each memory; da is the sum over the memories
  float* dgamma = nullptr;   // [memories, B, T, H]; dgamma is the sum over the memories
  float* dg = nullptr;       // [memories, B, T, H], present if g is; dg is the sum over the memories
  float* dweight = nullptr;  // [B, T, H, M] padded, the term of each token; present if there is a weight
  OutputTensor<4> dchunk_start[2];  // present if there are positions
  OutputTensor<4> dinitial[2];
};
cudaError_t trellis_fp32_backward(const TrellisFp32Backward& problem, Workspace& workspace,
                                  cudaStream_t stream);

// Whether the current device has enough shared memory for the kernels in fp32.
cudaError_t trellis_fp32_fits(const TrellisFp32Shape& shape, bool& fits);

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

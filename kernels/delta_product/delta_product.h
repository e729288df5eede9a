// DeltaProduct: plan functions of forward and backward, with 16-bit operands and in fp32, and the decoding
// step.
//
//     S <- e^{g_t} S                                          once a token, before its first step      [D, V]
//     for j < n:  S <- S + k_{t,j} (w_{t,j} - S^T b_{t,j})^T                 b = beta k,  w = beta v
//     o_t = scale * S_t^T q_t                                 after the last step                         [V]
//     S <- phi(S)                                             when a chunk of the model is complete
//
// beta is a number for every step, or for every channel; D = V then. The 16-bit kernels have no phi, and with
// a beta for every channel no gates and no l2norm_qk. The equations of the kernels are in kernels.h,
// channel_beta.h and fp32.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"
#include "tile/workspace.h"

namespace girih::kernels {

constexpr int kDeltaChunkRows = 64;             // rows of a chunk of the kernels, at most; a row is a step
constexpr int kDeltaMaxWidth = 256;             // largest D and V
constexpr int kDeltaMaxSteps = 16;              // largest n of the 16-bit kernels
constexpr int kDeltaChannelBetaMaxWidth = 128;  // largest D of these with a beta for every channel
constexpr int kDeltaPreparedBytes = 11648;      // of `prepared`, for each chunk and head

// Tokens of a chunk of the kernels.
__host__ __device__ constexpr int delta_chunk_tokens(int n) { return kDeltaChunkRows / n; }

// Every row of a 16-bit array is aligned to 16 bytes. D and V are multiples of 8, padded with zeros.
struct DeltaShape {
  SequenceLayout tokens;
  int heads;         // H, heads of the memory
  int output_heads;  // HO, heads of the output, a multiple of H
  int key_share;     // H / HK: heads of the memory that share a head of k
  int query_share;   // HO / HQ: heads of the output that share a head of q; always 1 if HO > H
  int D, V;
  int n;
  bool unit;    // q and k are divided by their length
  DType dtype;  // type of q, k, v, o: fp16 or bf16
  float scale;
};

// Saved tensors, which forward writes and backward reads:
//   states       dtype [chunks, H, V, D]: the transposed state before every chunk; chunks =
//                token_range_count(tokens, delta_chunk_tokens(n))
//   prepared     [chunks, H, kDeltaPreparedBytes]: the output of delta_prepare
//   transitions  [delta_saved_segments(), H, D, D], row-major: the transitions of the segments of a scan
struct DeltaForward {
  DeltaShape shape;
  bool has_channel_beta;
  InputTensor<4> q, k, v;  // [B, T, HQ, D], [B, T n, HK, D], [B, T n, H, V]
  InputTensor<4> beta;     // [B, T n, H, 1], any dtype; has_channel_beta: [B, T n, H, D], no fp64
  InputTensor<3> g;        // [B, T, H], any dtype; absent: no gates
  InputTensor<4> initial;  // [N, H, D, V] fp32; absent: zero
  OutputTensor<4> final;   // [N, H, D, V] fp32
  OutputTensor<4> o;       // [B, T, HO, V]
  // Saved tensors, all null if there is no backward; transitions also if delta_saved_segments() is 0.
  void *states, *prepared;
  float* transitions;
};

cudaError_t delta_forward(const DeltaForward& problem, Workspace& workspace, cudaStream_t stream);

// The number of segments into which backward cuts all sequences, and for which forward saves transitions. 0
// if backward does not cut; forward may still cut sequences into two segments.
int64_t delta_saved_segments(const DeltaShape& shape);

// dq, dk and dg have one entry for each head of the output. The caller sums the entries of heads that share a
// query, a key or a memory.
struct DeltaBackward {
  DeltaShape shape;
  bool has_channel_beta;
  InputTensor<4> q, k, v, dout;  // as in forward; [B, T, HO, V]
  InputTensor<4> beta;           // read with has_channel_beta
  InputTensor<4> initial;        // as in forward; read with gates
  InputTensor<4> dfinal;         // [N, H, D, V] fp32: gradient of the final state; absent: zero
  const void *states, *prepared;
  const float* transitions;
  OutputTensor<4> dinitial;  // [N, H, D, V] fp32
  OutputTensor<4> dq;        // [B, T, HO, D]
  OutputTensor<4> dk;        // [B, T n, HO, D], fp32 if HO > H; has_channel_beta: [B, T n, H, D]
  OutputTensor<4> dv;        // [B, T n, H, V]
  OutputTensor<4> dbeta;     // [B, T n, H, 1] fp32; has_channel_beta: [B, T n, H, D] in the type of beta
  OutputTensor<3> dg;        // [B, T, HO] fp32; absent: no gates
};

cudaError_t delta_backward(const DeltaBackward& problem, Workspace& workspace, cudaStream_t stream);

// Sets `fits` if the current device has enough shared memory for these kernels at width D.
cudaError_t delta_fits(int D, bool has_channel_beta, bool& fits);

enum class Between : int { none, gelu, tanh };

// Cuts sequences into segments of up to 64 rows: sequences into chunks of `chunk` tokens, chunks into
// segments of `size` tokens. Without a function between chunks a chunk is one segment. With one, a sequence
// may begin inside of a chunk, and one more segment follows its last; its saved state is an argument of the
// function.
struct DeltaSegments {
  SequenceLayout tokens;
  int size, chunk;
  Between between;
  const int64_t* position;  // [N]: tokens of the first chunk that came before the sequence; null: none
};

// n is at most kDeltaChunkRows. `chunk` is the chunk of `between`.
inline DeltaSegments delta_segments(const SequenceLayout& tokens, int n, Between between, int64_t chunk,
                                    const int64_t* position) {
  const int rows = delta_chunk_tokens(n);
  if (between == Between::none) return {tokens, rows, rows, between, nullptr};
  const int length = static_cast<int>(chunk);
  return {tokens, rows < length ? rows : length, length, between, position};
}

__host__ __device__ inline int segments_per_chunk(const DeltaSegments& p) {
  return (p.chunk + p.size - 1) / p.size;
}
// Segments of a batch row that is not packed. spare_chunks: chunks by which the segments of a packed sequence
// may exceed its tokens / chunk.
__host__ __device__ inline int64_t segments_per_row(const DeltaSegments& p) {
  const int64_t chunks = p.between == Between::none ? (p.tokens.tokens + p.chunk - 1) / p.chunk
                                                    : (p.tokens.tokens + 2 * p.chunk - 2) / p.chunk + 1;
  return chunks * segments_per_chunk(p);
}
__host__ __device__ inline int spare_chunks(const DeltaSegments& p) {
  return p.between == Between::none ? 1 : 3;
}
__host__ __device__ inline int64_t segment_count(const DeltaSegments& p) {
  if (!is_packed(p.tokens)) return p.tokens.batch * segments_per_row(p);
  return (p.tokens.tokens / p.chunk + spare_chunks(p) * p.tokens.sequences) * segments_per_chunk(p);
}

// `width` rounded up to a multiple of 4: the row length of fp32 arrays.
template <class Int>
__host__ __device__ constexpr Int round_up_to_4(Int width) {
  return (width + 3) & ~Int{3};
}

struct DeltaFp32Shape {
  DeltaSegments segments;
  int heads, query_heads;
  int D, V, n;
  float scale;
};

// Whether the fp32 kernels read q and k and write dq in place. Rows of these tensors are then aligned to 16
// bytes, and rows of dq outside of all sequences are not written.
constexpr bool delta_fp32_is_in_place(DType dtype, bool unit, int D) {
  return dtype == DType::f32 && !unit && D % 4 == 0;
}

// Saved tensors in fp32: states [segment_count(), H, V, D rounded up to a multiple of 4], the state before
// every segment and before the function between chunks; u [B, T n, H, V rounded up to a multiple of 4], the
// rows that the steps write.
struct DeltaFp32Forward {
  DeltaFp32Shape shape;
  bool unit;               // q and k are divided by their length
  InputTensor<4> q, k, v;  // [B, T, HQ, D], [B, T n, H, D], [B, T n, H, V], any strides, no fp64
  InputTensor<4> beta;     // [B, T n, H, D], or [B, T n, H, 1] with a last stride of 0; any strides
  InputTensor<3> g;        // [B, T, H] fp32; absent: no gates
  InputTensor<4> initial;  // [N, H, D, V] fp32; absent: zero
  OutputTensor<4> final;   // [N, H, D, V] fp32
  OutputTensor<4> o;       // [B, T, HQ, V] fp32, contiguous
  int64_t* position;       // [N]: position of the next token in its chunk; null: not stored
  float* states;           // null: no backward
  OutputTensor<4> u;       // absent: no backward
};

cudaError_t delta_fp32_forward(const DeltaFp32Forward& problem, Workspace& workspace, cudaStream_t stream);

// A block of the kernel that computes dg has 64 channels of D.
constexpr int delta_gate_slabs(int D) { return (D + 63) / 64; }

struct DeltaFp32Backward {
  DeltaFp32Shape shape;
  bool unit;
  bool has_channel_beta;
  InputTensor<4> q, k, v, beta;  // as in forward
  InputTensor<3> g;
  InputTensor<4> dout;    // [B, T, HQ, V] fp32, rows aligned to 16 bytes and padded to a multiple of 4
  InputTensor<4> dfinal;  // [N, H, D, V] fp32: gradient of the final state; absent: zero
  const float* states;
  InputTensor<4> u;
  OutputTensor<4> dinitial;           // [N, H, D, V] fp32
  OutputTensor<4> dq, dk, dv, dbeta;  // shapes and dtypes of q, k, v, beta; any strides
  float* dg;  // [delta_gate_slabs(D), B, T, H] fp32, summed by the caller; null: no gates
};

cudaError_t delta_fp32_backward(const DeltaFp32Backward& problem, Workspace& workspace, cudaStream_t stream);

// Limit of n and of HO / H in delta_step; set by shared memory.
constexpr int kDeltaStepLimit = 8;

// One token. All strides and all types except fp64 are allowed, D up to 256. The state is updated in place.
struct DeltaStep {
  int64_t sequences;
  int heads, output_heads, key_share, query_share;  // as in DeltaShape
  int D, V, n;
  bool unit;
  float scale;
  InputTensor<3> q;     // [N, HQ, D]
  InputTensor<4> k, v;  // [N, n, HK, D], [N, n, H, V]
  InputTensor<4>
      beta;          // [N, n, H, D] with D = V (beta for every channel), or [N, n, H] with a last stride of 0
  InputTensor<2> g;  // [N, H], optional
  OutputTensor<4> state;  // [N, H, D, V] fp32
  OutputTensor<3> o;      // [N, HO, V]
};

cudaError_t delta_step(const DeltaStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

// Gated linear attention (GLA).
//
//     S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T          [D, V]
//     o_t = scale * S_t^T q_t                          [V]
//
// The plans gla_* serve a gate for each key channel, the plans gla_head_* a gate for each head (g_t is a
// scalar) or no gate, and the plans gla_fp32_* a gate for each channel in fp32.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

// A gate for each channel. This is the second memory of gsa alone, with q in place of p and k in place of s.
// Reuses GsaShape with M = D and D = 0.
struct GlaInputs {
  GsaShape shape;
  InputTensor<4> q, k, v;  // [B, T, HQ, M], [B, T, H, M], [B, T, H, V]
  InputTensor<4> g;        // [B, T, H, M] fp32
  InputTensor<4> initial;  // S^T [N, H, V, M] fp32; absent: zero
};

struct GlaForward {
  GlaInputs inputs;
  OutputTensor<4> final;  // as initial
  // The states before all chunks, for backward: dtype [token_range_count(tokens, 64), H, V, M]; null: not
  // saved.
  void* states;
  OutputTensor<4> o;  // [B, T, HQ, V]
};

cudaError_t gla_forward(const GlaForward& problem, Workspace& workspace, cudaStream_t stream);

// If several query heads share a memory head, each query head writes its own terms of dk, dv and dg in fp32,
// and the caller sums them.
struct GlaBackward {
  GlaInputs inputs;
  const void* states;        // from gla_forward
  InputTensor<4> dout;       // [B, T, HQ, V]
  InputTensor<4> dfinal;     // as initial; absent: zero
  OutputTensor<4> dq;        // [B, T, HQ, M]
  OutputTensor<4> dk, dv;    // [B, T, HQ, M], [B, T, HQ, V], dtype or fp32
  OutputTensor<4> dg;        // [B, T, HQ, M] fp32
  OutputTensor<4> dinitial;  // as initial, optional
};

cudaError_t gla_backward(const GlaBackward& problem, Workspace& workspace, cudaStream_t stream);

// fits: whether the current device has enough shared memory for these plans with D key channels.
cudaError_t gla_fits(int D, bool& fits);

constexpr int kHeadMaxKeys = 256;      // D
constexpr int kHeadPair = 2 * kChunk;  // tokens of a pair of chunks

// Rows of 16-bit arrays are aligned to 16 bytes. D and V are the padded widths, multiples of 8; keys and
// values are the widths without padding. Every output head is processed independently. If several output
// heads share a memory head, a key head or a query head, each output head writes its own terms and the caller
// sums them.
struct HeadShape {
  SequenceLayout tokens;
  int heads, query_heads;  // H: heads of the memory; HO: heads of the outputs, a multiple of H
  int key_share;           // memory heads that share one head of k: k has H / key_share heads
  int query_share;         // output heads that share one head of q; 1 if HO > H
  int D, V, keys, values;
  DType dtype;  // fp16 or bf16
  float scale;
  InputTensor<3> g;  // [B, T, H], any type; absent: no decay
};

struct GlaHeadInputs {
  HeadShape shape;         // with the gates
  InputTensor<4> q, k, v;  // [B, T, HQ, D], [B, T, HK, D], [B, T, H, V]
  InputTensor<4> initial;  // S^T [N, H, values, keys] fp32; absent: zero
};

struct GlaHeadForward {
  GlaHeadInputs inputs;
  OutputTensor<4> final;  // as initial
  // The states before all pairs of chunks, for backward: dtype [token_range_count(tokens, kHeadPair), H, V,
  // D]; null: not saved.
  void* states;
  OutputTensor<4> o;  // [B, T, HO, V]
};

cudaError_t gla_head_forward(const GlaHeadForward& problem, Workspace& workspace, cudaStream_t stream);

// Every output head writes its own terms of dq, dk and dv, in dtype or in fp32.
struct GlaHeadBackward {
  GlaHeadInputs inputs;
  const void* states;          // from gla_head_forward
  InputTensor<4> dout;         // [B, T, HO, V]
  InputTensor<4> dfinal;       // [N, HO, values, keys] fp32; absent: zero
  OutputTensor<4> dq, dk, dv;  // [B, T, HO, D], [B, T, HO, D], [B, T, HO, V]
  OutputTensor<3> dg;          // [B, T, H], any type; absent if g is absent
  OutputTensor<4> dinitial;    // as dfinal, optional
};

cudaError_t gla_head_backward(const GlaHeadBackward& problem, Workspace& workspace, cudaStream_t stream);

cudaError_t gla_head_fits(int D, bool& fits);

// The plans in fp32 serve any D and V, and save no states. q is fp32 and contains scale. The type of shape is
// f32; k, v, o and dv are fp32, fp16 or bf16.
struct GlaFp32Forward {
  GlaInputs inputs;
  OutputTensor<4> final;
  OutputTensor<4> o;
};

cudaError_t gla_fp32_forward(const GlaFp32Forward& problem, Workspace& workspace, cudaStream_t stream);

// The gradients of all query heads of a memory head are summed.
struct GlaFp32Backward {
  GlaInputs inputs;
  InputTensor<4> dout;
  InputTensor<4> dfinal;
  OutputTensor<4> dq;        // [B, T, HQ, M] fp32, of the scaled q
  OutputTensor<4> dk, dv;    // [B, T, H, M] fp32, [B, T, H, V]
  OutputTensor<4> dg;        // [B, T, H, M] fp32, optional
  OutputTensor<4> dinitial;  // optional
};

cudaError_t gla_fp32_backward(const GlaFp32Backward& problem, Workspace& workspace, cudaStream_t stream);

// One token. Any kind of gate, any sizes whose vectors fit in shared memory, any strides, any types except
// fp64. The state is updated in place.
struct GlaStep {
  int64_t sequences;
  int heads, query_heads, key_share, query_share;  // as in HeadShape
  int D, V;
  float scale;
  InputTensor<3> q, k, v;  // [N, HQ, D], [N, HK, D], [N, H, V]
  InputTensor<3> g;        // [N, H, D], optional
  OutputTensor<4> state;   // [N, H, D, V] fp32
  OutputTensor<3> o;       // [N, HO, V]
};

cudaError_t gla_step(const GlaStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

// Gated slot attention (GSA).
//
//     Hk_t = Hk_{t-1} Diag(e^{g_t}) + k_t s_t^T          [D, M]
//     p_t  = feature(scale * Hk_t^T q_t)                 [M]
//     Hv_t = Diag(e^{g_t}) Hv_{t-1} + s_t v_t^T          [M, V]
//     o_t  = Hv_t^T p_t                                  [V]
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"
#include "tile/workspace.h"

namespace girih::kernels {

constexpr int kGsaMaxSlots = 128;  // M
constexpr int kGsaMaxWidth = 512;  // D and V

enum class Feature : int { softmax, none, silu, relu, relu2 };

// Rows of every array are aligned to 16 bytes: strides and widths are multiples of 8 for 16-bit arrays and of
// 4 for fp32 arrays.
struct GsaShape {
  SequenceLayout tokens;
  int heads;        // H: heads of the memories
  int query_heads;  // HQ, a multiple of H
  int D, V, M;
  int slots;    // number of slots without padding; M is padded
  DType dtype;  // of q, k, v, s and o: fp16 or bf16. In the fp32 plans f32, the type of s and of the states
  Feature feature;
  float scale;
};

struct GsaInputs {
  GsaShape shape;
  InputTensor<4> q, k, v;     // [B, T, HQ, D], [B, T, H, D], [B, T, H, V]
  InputTensor<4> s;           // [B, T, H, M]; absent: 1 - e^g
  InputTensor<4> g;           // [B, T, H, M] fp32
  InputTensor<4> initial[2];  // Hk [N, H, D, M] and Hv [N, H, V, M], fp32; absent: zero
};

struct GsaForward {
  GsaInputs inputs;
  OutputTensor<4> final[2];  // as initial
  // The states before all chunks, for backward: dtype [token_range_count(tokens, 64), H, D + V, M]; null: not
  // saved.
  void* states;
  OutputTensor<4> o;  // [B, T, HQ, V]
};

cudaError_t gsa_forward(const GsaForward& problem, Workspace& workspace, cudaStream_t stream);

// If several query heads share a memory head, each query head writes its own terms of dk, dv, ds and dg in
// fp32, and the caller sums them.
struct GsaBackward {
  GsaInputs inputs;
  const void* states;           // from gsa_forward
  InputTensor<4> dout;          // [B, T, HQ, V]
  InputTensor<4> dfinal[2];     // as initial; absent: zero
  OutputTensor<4> dq;           // [B, T, HQ, D]
  OutputTensor<4> dk, dv;       // [B, T, HQ, D], [B, T, HQ, V], dtype or fp32
  OutputTensor<4> ds;           // [B, T, HQ, M], dtype or fp32; absent if s is absent
  OutputTensor<4> dg;           // [B, T, HQ, M] fp32
  OutputTensor<4> dinitial[2];  // as initial, optional
};

cudaError_t gsa_backward(const GsaBackward& problem, Workspace& workspace, cudaStream_t stream);

// fits: whether the current device has enough shared memory for these plans with M slots.
cudaError_t gsa_fits(int M, bool& fits);

// The plans in fp32 serve any D, V and M, and save no states. q, k, v, o and their gradients are fp32, fp16
// or bf16. s is fp32 and is present. With is_abc, s and g are absent: the plans compute the weights and the
// gates of ABC from its logits (AbcGates in fp32/fp32.h).
struct GsaFp32Inputs {
  GsaInputs gated;
  bool is_abc;
  InputTensor<4> logits;     // [B, T, H, slots] fp32, any strides
  InputTensor<3> initial_z;  // [N, H, slots] fp32; absent: empty (-inf)
};

struct GsaFp32Forward {
  GsaFp32Inputs inputs;
  OutputTensor<4> final[2];
  OutputTensor<3> final_z;  // with is_abc
  OutputTensor<4> o;
};

cudaError_t gsa_fp32_forward(const GsaFp32Forward& problem, Workspace& workspace, cudaStream_t stream);

// The gradients of all query heads of a memory head are summed.
struct GsaFp32Backward {
  GsaFp32Inputs inputs;
  bool is_s_derived;  // s = 1 - e^g: dg contains the gradient through s
  InputTensor<4> dout;
  InputTensor<4> dfinal[2];
  InputTensor<3> dfinal_z;     // optional
  OutputTensor<4> dq, dk, dv;  // [B, T, HQ, D], [B, T, H, D], [B, T, H, V]
  OutputTensor<4> ds, dg;      // [B, T, H, M] fp32, optional
  OutputTensor<4> dlogits;     // [B, T, H, slots] fp32, with is_abc
  OutputTensor<4> dinitial[2];
  OutputTensor<3> dinitial_z;  // with initial_z
};

cudaError_t gsa_fp32_backward(const GsaFp32Backward& problem, Workspace& workspace, cudaStream_t stream);

// One token. Any sizes whose vectors fit in shared memory, any strides, any types except fp64. The state is
// updated in place.
struct GsaStep {
  int64_t sequences;
  int heads, query_heads;
  int D, V, M;
  Feature feature;
  float scale;
  InputTensor<3> q, k, v;   // [N, HQ, D], [N, H, D], [N, H, V]
  InputTensor<3> s;         // [N, H, M]: weights; absent: 1 - e^g; with z: the logits of ABC
  InputTensor<3> g;         // [N, H, M]; absent if z is given
  OutputTensor<4> state_k;  // [N, H, D, M] fp32
  OutputTensor<4> state_v;  // [N, H, M, V] fp32
  OutputTensor<3> z;        // [N, H, M] fp32, ABC only
  OutputTensor<3> o;        // [N, HQ, V]
};

cudaError_t gsa_step(const GsaStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

// Gated slot attention (GSA).
//
//     Hk_t = Hk_{t-1} Diag(e^{g_t}) + k_t s_t^T          [D, M]
//     p_t  = feature(scale * Hk_t^T q_t)                 [M]
//     Hv_t = Diag(e^{g_t}) Hv_{t-1} + s_t v_t^T          [M, V]
//     o_t  = Hv_t^T p_t                                  [V]
//
// A chunk has 64 tokens. The update of a memory depends neither on the other memory nor on a read, so forward
// has two kernels:
//   gated_scan  both memories, chunk after chunk; writes the state before every chunk
//   gsa_output  each chunk alone: logits, feature, o
// Backward has three kernels and uses the states that forward saved:
//   gsa_dq      each chunk alone: p, dp, the gradient of the logits, dq
//   gated_scan  the gradients of both memories, from the last chunk to the first
//   gsa_dkv     each chunk alone: dk, dv, ds, dg
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kSlab = 64;          // columns of D or V that a block loads at a time: rows of the states
constexpr int kGsaMaxSlots = 128;  // M
constexpr int kGsaMaxWidth = 512;  // D and V

enum class Feature : int { softmax, none, silu, relu, relu2 };

// Rows of every array are aligned to 16 bytes: strides and widths are multiples of 8 for 16-bit arrays and of
// 4 for g.
struct GsaShape {
  SequenceLayout tokens;
  int heads;        // H: heads of the memories
  int query_heads;  // HQ, a multiple of H
  int D, V, M;
  int slots;    // number of slots without padding; M is padded
  DType dtype;  // of q, k, v, s, o: fp16 or bf16
  Feature feature;
  float scale;
};

// The state X [width, M] of one memory: X <- X Diag(e^{g_t}) + x_t s_t^T.
struct ScannedMemory {
  InputTensor<4> x;        // [B, T, heads (times group), width]
  InputTensor<4> s;        // [B, T, heads (times group), M]; absent: s = 1 - e^g
  InputTensor<4> initial;  // [N, heads, width, M] fp32; absent: zero
  OutputTensor<4> final;   // [N, heads, width, M] fp32; absent: not written
  int width = 0;           // 0: the memory does not exist
};

// Forward: states[c] is the state before chunk c; final is the state after the last token.
//
// Reverse, from the last token to the first: G_{t-1} = (G_t + x_t y_t^T) e^{g_t} with x = q, y = scale * dz
// or x = do, y = p. s is y_scan, as above: p_scan or dz_scan of GsaDq. The tensor dz of GsaDq contains scale.
// states[c] is the gradient of the state after chunk c, summed over later tokens; initial is the gradient of
// the final state; final is the gradient of the initial state. All `group` query heads of a memory head are
// summed.
struct GatedScan {
  SequenceLayout tokens;
  int heads, group, M;  // group: query heads of a memory head in reverse; forward: 1
  DType dtype;          // of x, s and the states. f32: each x and s has its own type; in reverse s is y
  bool reverse;
  InputTensor<4> g;                   // [B, T, heads, M] fp32
  const bool* is_factored = nullptr;  // reverse: the scaling of s, see GateGradientTerms
  ScannedMemory memory[2];
  void* states;     // dtype [token_range_count(tokens, 64), heads, memory[0].width + memory[1].width, M]
  void* workspace;  // gated_scan_workspace() bytes; may be null if this is 0
};

int64_t gated_scan_workspace(const GatedScan& problem);
cudaError_t gated_scan(const GatedScan& problem, cudaStream_t stream);

struct GsaOutput {
  GsaShape shape;
  InputTensor<4> q, k, v;  // [B, T, HQ, D], [B, T, H, D], [B, T, H, V]
  InputTensor<4> s;        // [B, T, H, M]; absent: 1 - e^g
  InputTensor<4> g;        // [B, T, H, M] fp32
  const void* states;      // from the scan of (k, v)
  OutputTensor<4> o;       // [B, T, HQ, V]
};

cudaError_t gsa_output(const GsaOutput& problem, cudaStream_t stream);

// Results of gsa_dq that the reverse scan and gsa_dkv read, besides y (p or dz).
//
// X_t is the sum of g over the tokens of the chunk after t. If the sums of the gates allow it (then
// is_factored is true), y_scan = y e^{-X_t}, in fp16 times 2^-6 (factor_shift). The scan and gsa_dkv then
// read the same rounded values: dg is a difference of sums with the same terms of pairs of rows, which
// cancel. Otherwise y_scan = y e^{L_t}, L_t the sum of g through row t, and gsa_dkv reads y.
struct GateGradientTerms {
  bool* is_factored;  // [token_range_count(tokens, 64), heads]
  OutputTensor<4> w;  // [B, T, HQ, M] fp32: z dz + p dp, without the terms of the row's own token
};

struct GsaDq {
  GsaShape shape;
  InputTensor<4> q, k, v, s, g;
  const void* states;   // from the scan of (k, v)
  InputTensor<4> dout;  // [B, T, HQ, V]
  OutputTensor<4> dq;   // [B, T, HQ, D]
  GateGradientTerms gate_terms;
  OutputTensor<4> p, dz;            // [B, T, HQ, M]: y, dz times scale; not written for factored chunks
  OutputTensor<4> p_scan, dz_scan;  // y_scan
};

cudaError_t gsa_dq(const GsaDq& problem, cudaStream_t stream);

// The memory x [width, M]; its gradient is the sum of read_t y_t^T.
struct DkvMemory {
  InputTensor<4> x, read;    // [B, T, H, width], [B, T, HQ, width]
  InputTensor<4> y, y_scan;  // [B, T, HQ, M]
  // Before a sequence's first token: the state (optional) and its gradient, [N, H, width, M] fp32.
  InputTensor<4> initial, dinitial;
  OutputTensor<4> dx;  // [B, T, HQ, width], dtype or fp32
  int width;
};

// The gradients other than dq. If several query heads share a memory head, each query head writes its own
// terms in fp32 and the caller sums them.
struct GatedDkv {
  GsaShape shape;
  InputTensor<4> s, g, w;
  DkvMemory memory[2];    // gla uses memory[1] only
  float y_scale;          // factor of y; y_scan contains it
  const void* states;     // [chunks, H, D + V, M], from the forward scan
  const void* gradients;  // [chunks, H, D + V, M], from the reverse scan
  OutputTensor<4> ds;     // [B, T, HQ, M], dtype or fp32; absent if s is absent
  OutputTensor<4> dg;     // [B, T, HQ, M] fp32
};

cudaError_t gsa_dkv(const GatedDkv& problem, cudaStream_t stream);

// fits: whether the current device has enough shared memory for these kernels with M slots.
cudaError_t gsa_fits(int M, bool& fits);

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

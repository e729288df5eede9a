// The kernels of gsa, of which gla uses the scan and the dkv kernel: argument structs and launch functions. A
// chunk has 64 tokens. The update of a memory depends neither on the other memory nor on a read, so forward
// has two kernels:
//   gated_scan     both memories, chunk after chunk; writes the state before every chunk
//   output kernel  each chunk alone: logits, feature, o
// Backward has three kernels and uses the states that forward saved:
//   dq kernel      each chunk alone: p, dp, the gradient of the logits, dq
//   gated_scan     the gradients of both memories, from the last chunk to the first
//   dkv kernel     each chunk alone: dk, dv, ds, dg
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

constexpr int kSlab = 64;  // columns of D or V that a block loads at a time: rows of the states

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
  DType dtype;          // of x, s and the states. fp32_scan: f32, and each x and s has its own type
  bool reverse;
  InputTensor<4> g;                   // [B, T, heads, M] fp32
  const bool* is_factored = nullptr;  // reverse: the scaling of s, see GateGradientTerms
  ScannedMemory memory[2];
  void* states;  // dtype [token_range_count(tokens, 64), heads, memory[0].width + memory[1].width, M]
};

cudaError_t gated_scan(const GatedScan& problem, Workspace& workspace, cudaStream_t stream);

struct GsaOutput {
  GsaShape shape;
  InputTensor<4> q, k, v;  // [B, T, HQ, D], [B, T, H, D], [B, T, H, V]
  InputTensor<4> s;        // [B, T, H, M]; absent: 1 - e^g
  InputTensor<4> g;        // [B, T, H, M] fp32
  const void* states;      // from the scan of (k, v)
  OutputTensor<4> o;       // [B, T, HQ, V]
};

// Results of the dq kernel that the reverse scan and the dkv kernel read, besides y (p or dz).
//
// X_t is the sum of g over the tokens of the chunk after t. If the sums of the gates allow it (then
// is_factored is true), y_scan = y e^{-X_t}, in fp16 times 2^-6 (factor_shift). The scan and the dkv
// kernel then read the same rounded values: dg is a difference of sums with the same terms of pairs of rows,
// which cancel. Otherwise y_scan = y e^{L_t}, L_t the sum of g through row t, and the dkv kernel reads y.
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

// Launch functions for each element type and tile of slots. Each instance is compiled in its own file.
template <typename T, int M>
cudaError_t launch_gsa_output(const GsaOutput& problem, cudaStream_t stream);
template <typename T, int M>
cudaError_t launch_gsa_dq(const GsaDq& problem, cudaStream_t stream);
// Memories: 2 for gsa, 1 for gla.
template <typename T, int M, int Memories>
cudaError_t launch_gated_dkv(const GatedDkv& problem, cudaStream_t stream);

}  // namespace girih::kernels

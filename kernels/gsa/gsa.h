// Gated slot attention.
//
//     Hk_t = Hk_{t-1} Diag(e^{g_t}) + k_t s_t^T          [D, M]
//     p_t  = feature(scale * Hk_t^T q_t)                 [M]
//     Hv_t = Diag(e^{g_t}) Hv_{t-1} + s_t v_t^T          [M, V]
//     o_t  = Hv_t^T p_t                                  [V]
//
// Chunks of 64 tokens. Neither memory needs the other, nor a read, to go on, so the work is two kernels:
//   scan      both memories from chunk to chunk, in order; writes the state before every chunk
//   output    every chunk by itself: logits, feature, read
// and backward three, with the states that forward kept:
//   rows      every chunk: p, dp, the logits' gradient, dq             (what a query row needs)
//   scan      the memories' gradients from chunk to chunk, from the end
//   columns   every chunk: dk, dv, ds, dg                              (what a key row needs)
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/sequence.h"

namespace girih::kernels {

constexpr int kSlab = 64;          // columns of D and V at a time
constexpr int kGsaMaxSlots = 128;  // M
constexpr int kGsaMaxWidth = 512;  // D and V

enum class Feature : int { softmax, none, silu, relu, relu2 };

// Rows of every array start at 16 bytes: strides and widths of 16-bit arrays are multiples of 8, of g of 4.
struct GsaShape {
  Tokens tokens;
  int heads;        // H, the memories'
  int query_heads;  // HQ, a multiple of H
  int D, V, M;
  int slots;    // of M, those that exist: the rest is padding
  DType dtype;  // of q, k, v, s, o: fp16 or bf16
  Feature feature;
  float scale;
};

// One memory that a scan carries: X <- X Diag(e^{g_t}) + x_t s_t^T, [width, M].
struct ScannedMemory {
  In<4> x;        // [B, T, heads (times group), width]
  In<4> s;        // [B, T, heads (times group), M]; absent: 1 - e^g
  In<4> initial;  // [N, heads, width, M] fp32, optional: zero
  Out<4> final;   // [N, heads, width, M] fp32, optional: not written
  int width = 0;  // 0: no such memory
};

// Forward: states[c] is the state before chunk c, final the one after the last token.
// Reverse: from the last token to the first, G_{t-1} = (G_t + x_t y_t^T) e^{g_t} with x = q, y = scale * dz
// or x = do, y = p. s is y_scan of RowGradients. states[c] is the gradient that reaches the state
// after chunk c from later tokens, `initial` the final state's gradient, `final` the initial state's. All
// `group` query heads of a memory add to it.
struct GatedScan {
  Tokens tokens;
  int heads, group, M;
  DType dtype;  // of x, s and the states; f32: each x and s has its own, and in reverse s is y as it is
  bool reverse;
  In<4> g;                         // [B, T, heads, M] fp32
  const bool* factored = nullptr;  // reverse: how s is scaled, see RowGradients
  ScannedMemory memory[2];
  void* states;     // dtype [piece_count(tokens, 64), heads, memory[0].width + memory[1].width, M]
  void* workspace;  // gated_scan_workspace() bytes, may be null when that is 0
};

int64_t gated_scan_workspace(const GatedScan& problem);
cudaError_t gated_scan(const GatedScan& problem, cudaStream_t stream);

struct GsaOutput {
  GsaShape shape;
  In<4> q, k, v;       // [B, T, HQ, D], [B, T, H, D], [B, T, H, V]
  In<4> s;             // [B, T, H, M], absent: 1 - e^g
  In<4> g;             // [B, T, H, M] fp32
  const void* states;  // of the scan of (k, v)
  Out<4> o;            // [B, T, HQ, V]
};

cudaError_t gsa_output(const GsaOutput& problem, cudaStream_t stream);

// What a chunk's query rows leave for the reverse scan and the columns, besides y, what they give to a
// memory. y_scan is y as the scan takes it: where the gates of the chunk allow it (factored) y e^{-X_t}, in
// fp16 2^-6 of it (factor_shift), X_t the sum of g after the row, which the columns take too: rounded once,
// so that what pairs of rows add to dg cancels; elsewhere y e^{sum of g through the row}, and the columns
// take y itself.
struct RowGradients {
  bool* factored;  // [piece_count(tokens, 64), heads]
  Out<4> w;        // [B, T, HQ, M] fp32: what a row read * its gradient, but for its own token
};

struct GsaRows {
  GsaShape shape;
  In<4> q, k, v, s, g;
  const void* states;  // of the scan of (k, v)
  In<4> dout;          // [B, T, HQ, V]
  Out<4> dq;           // [B, T, HQ, D]
  RowGradients left;
  Out<4> p, dz;            // [B, T, HQ, M], scale in dz: y, not written where factored
  Out<4> p_scan, dz_scan;  // y_scan
};

cudaError_t gsa_rows(const GsaRows& problem, cudaStream_t stream);

// A memory of x, [width, M], that rows gave to: read_t y_t^T.
struct ColumnMemory {
  In<4> x, read;    // [B, T, H, width], [B, T, HQ, width]
  In<4> y, y_scan;  // [B, T, HQ, M]
  // Before a sequence's first token: the state, optional, and its gradient, [N, H, width, M] fp32.
  In<4> initial, start;
  Out<4> dx;  // [B, T, HQ, width], dtype or fp32
  int width;
};

// The other gradients, from the reverse scan. Those of a memory head that serves several query heads are the
// sum of what each of them gives here: an array of their own, in fp32.
struct GatedColumns {
  GsaShape shape;
  In<4> s, g, w;
  ColumnMemory memory[2];  // gla has the second
  float y_scale;           // y counts so often; it is in y_scan
  const void* states;      // of the forward scan
  const void* gradients;   // of the reverse scan
  Out<4> ds;               // [B, T, HQ, M], dtype or fp32, absent with s
  Out<4> dg;               // [B, T, HQ, M] fp32
};

cudaError_t gsa_columns(const GatedColumns& problem, cudaStream_t stream);

// Whether the current device has the shared memory for these kernels at M slots.
cudaError_t gsa_fits(int M, bool& fits);

// One token; any sizes whose vectors have room in shared memory, strides and types but fp64. The state is
// written in place.
struct GsaStep {
  int64_t sequences;
  int heads, query_heads;
  int D, V, M;
  Feature feature;
  float scale;
  In<3> q, k, v;   // [N, HQ, D], [N, H, D], [N, H, V]
  In<3> s;         // [N, H, M]: weights, absent: 1 - e^g; with z the logits of ABC
  In<3> g;         // [N, H, M], absent with z
  Out<4> state_k;  // [N, H, D, M] fp32
  Out<4> state_v;  // [N, H, M, V] fp32
  Out<3> z;        // [N, H, M] fp32, ABC only
  Out<3> o;        // [N, HQ, V]
};

cudaError_t gsa_step(const GsaStep& problem, cudaStream_t stream);

}  // namespace girih::kernels

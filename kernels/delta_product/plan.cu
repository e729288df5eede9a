// The plans of forward and backward with 16-bit operands.
#include "delta_product/channel_beta.h"
#include "delta_product/kernels.h"

namespace girih::kernels {
namespace delta_product {
namespace {

int64_t chunk_count(const DeltaShape& shape) {
  return token_range_count(shape.tokens, delta_chunk_tokens(shape.n));
}

// [B, T n, H, width] in the dtype of the call.
OutputTensor<4> allocate_rows(const DeltaShape& shape, int width, Workspace& workspace) {
  return workspace.tensor(shape.dtype, shape.tokens.batch, shape.tokens.tokens * shape.n, shape.heads, width);
}

// beta [B, T n, H, 1] as [B, T n, H].
template <template <int> class Tensor>
Tensor<3> drop_channel(const Tensor<4>& beta) {
  return {beta.data, beta.dtype, {beta.stride[0], beta.stride[1], beta.stride[2]}};
}

// b = beta k,  w = beta v
struct ChannelBetaRows {
  InputTensor<4> b, w;
};

template <class Problem>
cudaError_t compute_channel_beta_rows(const Problem& p, Workspace& workspace, cudaStream_t stream,
                                      ChannelBetaRows& result) {
  DeltaChannelBetaRows rows;
  rows.shape = p.shape;
  rows.k = p.k, rows.v = p.v, rows.beta = p.beta;
  rows.b = allocate_rows(p.shape, p.shape.D, workspace);
  rows.w = allocate_rows(p.shape, p.shape.V, workspace);
  result = {as_input(rows.b), as_input(rows.w)};
  return delta_channel_beta_rows(rows, stream);
}

// Absent `b`: beta k.
cudaError_t prepare_chunks(const DeltaForward& p, const InputTensor<4>& b, void* prepared,
                           cudaStream_t stream) {
  DeltaPrepare prepare;
  prepare.shape = p.shape;
  prepare.k = p.k, prepare.b = b, prepare.g = p.g;
  if (!p.has_channel_beta) prepare.beta = drop_channel(p.beta);
  prepare.prepared = prepared;
  return delta_prepare(prepare, stream);
}

// `rows`: b, and w in place of v. Without a beta for every channel: an absent b, and v.
cudaError_t scan_chunks(const DeltaForward& p, const ChannelBetaRows& rows, const void* prepared,
                        Workspace& workspace, cudaStream_t stream) {
  DeltaScan scan;
  scan.shape = p.shape;
  scan.q = p.q, scan.k = p.k, scan.v = rows.w, scan.b = rows.b;
  scan.gated = p.g.data != nullptr;
  scan.prepared = prepared;
  scan.initial = p.initial, scan.final = p.final;
  scan.o = p.o;
  scan.states = p.states;
  scan.transitions = delta_saved_segments(p.shape) > 0 ? p.transitions : nullptr;
  return delta_scan(scan, workspace, stream);
}

// `dz_is_dv`: reverse may store dv in place of G. `result` has the arguments of delta_reverse.
cudaError_t reverse_chunks(const DeltaBackward& p, const InputTensor<4>& b, const OutputTensor<4>& dz,
                           bool dz_is_dv, Workspace& workspace, cudaStream_t stream, DeltaReverse& result) {
  const DeltaShape& shape = p.shape;
  const int64_t chunks = chunk_count(shape), states = chunks * shape.heads * shape.V * shape.D;
  result.shape = shape;
  result.q = p.q, result.k = p.k, result.b = b, result.dout = p.dout;
  result.gated = p.dg.data != nullptr;
  result.prepared = p.prepared;
  result.transitions = p.transitions;
  result.factors = workspace.array<float>(chunks * shape.output_heads * kDeltaChunkRows);
  result.initial = p.dfinal, result.final = p.dinitial;
  result.dz = dz, result.in_place = dz_is_dv;
  result.gradients = workspace.bytes(states * dtype_size(shape.dtype));
  return delta_reverse(result, workspace, stream);
}

cudaError_t compute_gradients(const DeltaBackward& p, const DeltaReverse& reverse, cudaStream_t stream) {
  DeltaGradients gradients;
  gradients.shape = p.shape;
  gradients.q = p.q, gradients.k = p.k, gradients.v = p.v, gradients.dout = p.dout;
  gradients.dz = as_input(reverse.dz), gradients.in_place = reverse.in_place;
  gradients.gated = reverse.gated;
  gradients.prepared = p.prepared, gradients.factors = reverse.factors;
  gradients.states = p.states, gradients.gradients = reverse.gradients;
  gradients.initial = p.initial, gradients.end = p.dfinal;
  gradients.dq = p.dq, gradients.dk = p.dk, gradients.dv = p.dv;
  gradients.dbeta = drop_channel(p.dbeta), gradients.dg = p.dg;
  return delta_gradients(gradients, stream);
}

cudaError_t compute_channel_beta_gradients(const DeltaBackward& p, const ChannelBetaRows& rows,
                                           const DeltaReverse& reverse, const OutputTensor<4>& db,
                                           cudaStream_t stream) {
  DeltaChannelBetaGradients gradients;
  gradients.shape = p.shape;
  gradients.q = p.q, gradients.k = p.k, gradients.b = rows.b, gradients.w = rows.w, gradients.dout = p.dout;
  gradients.dz = as_input(reverse.dz);
  gradients.prepared = p.prepared, gradients.states = p.states, gradients.gradients = reverse.gradients;
  gradients.dq = p.dq, gradients.dk = p.dk, gradients.db = db;
  return delta_channel_beta_gradients(gradients, stream);
}

cudaError_t compute_channel_beta_input_gradients(const DeltaBackward& p, const OutputTensor<4>& db,
                                                 const OutputTensor<4>& dw, cudaStream_t stream) {
  DeltaChannelBetaRowGradients gradients;
  gradients.shape = p.shape;
  gradients.k = p.k, gradients.v = p.v, gradients.beta = p.beta;
  gradients.db = as_input(db), gradients.dw = as_input(dw);
  gradients.dk = p.dk, gradients.dv = p.dv, gradients.dbeta = p.dbeta;
  return delta_channel_beta_row_gradients(gradients, stream);
}

cudaError_t run_channel_beta_backward(const DeltaBackward& p, Workspace& workspace, cudaStream_t stream) {
  ChannelBetaRows rows;
  GIRIH_TRY(compute_channel_beta_rows(p, workspace, stream, rows));
  // G is the gradient of w.
  const OutputTensor<4> dw = allocate_rows(p.shape, p.shape.V, workspace),
                        db = allocate_rows(p.shape, p.shape.D, workspace);
  DeltaReverse reverse;
  GIRIH_TRY(reverse_chunks(p, rows.b, dw, false, workspace, stream, reverse));
  GIRIH_TRY(compute_channel_beta_gradients(p, rows, reverse, db, stream));
  return compute_channel_beta_input_gradients(p, db, dw, stream);
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_forward(const DeltaForward& p, Workspace& workspace, cudaStream_t stream) {
  using namespace delta_product;
  ChannelBetaRows rows{{}, p.v};
  if (p.has_channel_beta) GIRIH_TRY(compute_channel_beta_rows(p, workspace, stream, rows));
  void* const prepared = p.prepared != nullptr
                             ? p.prepared
                             : workspace.bytes(chunk_count(p.shape) * p.shape.heads * kDeltaPreparedBytes);
  GIRIH_TRY(prepare_chunks(p, rows.b, prepared, stream));
  return scan_chunks(p, rows, prepared, workspace, stream);
}

cudaError_t delta_backward(const DeltaBackward& p, Workspace& workspace, cudaStream_t stream) {
  using namespace delta_product;
  if (p.has_channel_beta) return run_channel_beta_backward(p, workspace, stream);
  // With one output for each memory only `gradients` reads G. G and dv then share a tensor; depending on the
  // call, reverse has already stored dv.
  const bool dz_is_dv = p.shape.output_heads == p.shape.heads;
  const OutputTensor<4> dz = dz_is_dv ? p.dv : allocate_rows(p.shape, p.shape.V, workspace);
  DeltaReverse reverse;
  GIRIH_TRY(reverse_chunks(p, {}, dz, dz_is_dv, workspace, stream, reverse));
  return compute_gradients(p, reverse, stream);
}

}  // namespace girih::kernels

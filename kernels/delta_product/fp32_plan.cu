// The plans of forward and backward in fp32.
#include "delta_product/fp32.h"

namespace girih::kernels {
namespace delta_product {
namespace {

// fp32 rows of the sizes of q [B, T, HQ, D].
OutputTensor<4> allocate_query_rows(const DeltaFp32Shape& shape, Workspace& workspace) {
  const SequenceLayout& tokens = shape.segments.tokens;
  return workspace.tensor(DType::f32, tokens.batch, tokens.tokens, shape.query_heads, round_up_to_4(shape.D));
}
// fp32 rows [B, T n, H, width].
OutputTensor<4> allocate_step_rows(const DeltaFp32Shape& shape, int width, Workspace& workspace) {
  const SequenceLayout& tokens = shape.segments.tokens;
  return workspace.tensor(DType::f32, tokens.batch, tokens.tokens * shape.n, shape.heads,
                          round_up_to_4(width));
}

// The rows of the scan: q and k in fp32, of length 1 if they are normalised; b = beta k, w = beta v.
struct Fp32Rows {
  InputTensor<4> q, k, b, w;
};

// `has_w`: w is computed.
template <class Problem>
cudaError_t compute_fp32_rows(const Problem& p, bool has_w, Workspace& workspace, cudaStream_t stream,
                              Fp32Rows& result) {
  const DeltaFp32Shape& shape = p.shape;
  DeltaFp32Rows rows;
  rows.shape = shape, rows.unit = p.unit;
  rows.q = p.q, rows.k = p.k, rows.v = p.v, rows.beta = p.beta;
  const bool is_in_place = delta_fp32_is_in_place(p.q.dtype, p.unit, shape.D);
  if (!is_in_place) {
    rows.unit_q = allocate_query_rows(shape, workspace);
    rows.unit_k = allocate_step_rows(shape, shape.D, workspace);
  }
  rows.b = allocate_step_rows(shape, shape.D, workspace);
  if (has_w) rows.w = allocate_step_rows(shape, shape.V, workspace);
  result = {is_in_place ? p.q : as_input(rows.unit_q), is_in_place ? p.k : as_input(rows.unit_k),
            as_input(rows.b), as_input(rows.w)};
  return delta_fp32_rows(rows, stream);
}

cudaError_t reverse_fp32_rows(const DeltaFp32Backward& p, const Fp32Rows& rows, const OutputTensor<4>& du,
                              float* gradients, cudaStream_t stream) {
  DeltaFp32Scan scan{};
  scan.shape = p.shape, scan.reverse = true;
  scan.q = rows.q, scan.k = rows.k, scan.b = rows.b, scan.value = p.dout, scan.g = p.g;
  scan.initial = p.dfinal, scan.final = p.dinitial;
  scan.u = du;
  scan.states = p.states, scan.saved_states = gradients;
  return delta_fp32_scan(scan, stream);
}

// Gradients of the rows of the scan.
struct Fp32RowGradients {
  OutputTensor<4> dq, dk, db, du;
};

cudaError_t compute_fp32_gradients(const DeltaFp32Backward& p, const Fp32Rows& rows,
                                   const float* state_gradients, const Fp32RowGradients& results,
                                   cudaStream_t stream) {
  DeltaFp32Gradients gradients;
  gradients.shape = p.shape;
  gradients.q = rows.q, gradients.k = rows.k, gradients.b = rows.b, gradients.dout = p.dout;
  gradients.u = p.u, gradients.du = as_input(results.du);
  gradients.g = p.g;
  gradients.states = p.states, gradients.gradients = state_gradients;
  gradients.dq = results.dq, gradients.dk = results.dk, gradients.db = results.db;
  gradients.dg = p.dg;
  return delta_fp32_gradients(gradients, stream);
}

cudaError_t compute_fp32_input_gradients(const DeltaFp32Backward& p, const Fp32RowGradients& from,
                                         bool stores_dq, cudaStream_t stream) {
  DeltaFp32RowGradients gradients;
  gradients.shape = p.shape, gradients.unit = p.unit;
  gradients.q = p.q, gradients.k = p.k, gradients.v = p.v, gradients.beta = p.beta;
  gradients.dunit_q = as_input(from.dq), gradients.dunit_k = as_input(from.dk);
  gradients.db = as_input(from.db), gradients.dw = as_input(from.du);
  if (stores_dq) gradients.dq = p.dq;
  gradients.dk = p.dk, gradients.dv = p.dv;
  gradients.has_channel_beta = p.has_channel_beta, gradients.dbeta = p.dbeta;
  return delta_fp32_row_gradients(gradients, stream);
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_fp32_forward(const DeltaFp32Forward& p, Workspace& workspace, cudaStream_t stream) {
  using namespace delta_product;
  Fp32Rows rows;
  GIRIH_TRY(compute_fp32_rows(p, true, workspace, stream, rows));
  DeltaFp32Scan scan{};
  scan.shape = p.shape;
  scan.q = rows.q, scan.k = rows.k, scan.b = rows.b, scan.value = rows.w, scan.g = p.g;
  scan.initial = p.initial, scan.final = p.final;
  scan.o = p.o, scan.u = p.u;
  scan.saved_states = p.states;
  scan.position = p.position;
  return delta_fp32_scan(scan, stream);
}

cudaError_t delta_fp32_backward(const DeltaFp32Backward& p, Workspace& workspace, cudaStream_t stream) {
  using namespace delta_product;
  const DeltaFp32Shape& shape = p.shape;
  Fp32Rows rows;
  GIRIH_TRY(compute_fp32_rows(p, false, workspace, stream, rows));
  const bool dq_is_in_place = delta_fp32_is_in_place(p.q.dtype, p.unit, shape.D);
  const Fp32RowGradients results{dq_is_in_place ? p.dq : allocate_query_rows(shape, workspace),
                                 allocate_step_rows(shape, shape.D, workspace),
                                 allocate_step_rows(shape, shape.D, workspace),
                                 allocate_step_rows(shape, shape.V, workspace)};
  auto* const state_gradients =
      workspace.array<float>(segment_count(shape.segments) * shape.heads * shape.V * round_up_to_4(shape.D));
  GIRIH_TRY(reverse_fp32_rows(p, rows, results.du, state_gradients, stream));
  GIRIH_TRY(compute_fp32_gradients(p, rows, state_gradients, results, stream));
  return compute_fp32_input_gradients(p, results, !dq_is_in_place, stream);
}

}  // namespace girih::kernels

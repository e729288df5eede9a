// gsa_fp32_forward and gsa_fp32_backward: the launches.
#include "fp32/plan.h"
#include "gsa/gsa.h"

namespace girih::kernels {
namespace {

// [B, T, H, M] fp32
OutputTensor<4> new_key_rows(const GsaShape& shape, Workspace& workspace) {
  return workspace.tensor(DType::f32, shape.tokens.batch, shape.tokens.tokens, shape.heads, shape.M);
}

// The inputs of a call, with the weights and the gates of ABC in the workspace. final_z is optional.
cudaError_t compute_gates(const GsaFp32Inputs& p, const OutputTensor<3>& final_z, GsaInputs& in,
                          Workspace& workspace, cudaStream_t stream) {
  in = p.gated;
  if (!p.is_abc) return cudaSuccess;
  const GsaShape& shape = in.shape;
  AbcGates gates{};
  gates.tokens = shape.tokens;
  gates.heads = shape.heads, gates.M = shape.M, gates.slots = shape.slots;
  gates.logits = p.logits, gates.initial = p.initial_z;
  gates.s = new_key_rows(shape, workspace), gates.g = new_key_rows(shape, workspace);
  gates.final = final_z;
  if (final_z.data == nullptr) {
    gates.final = workspace.tensor(DType::f32, shape.tokens.sequences, shape.heads, shape.slots);
  }
  in.s = as_input(gates.s), in.g = as_input(gates.g);
  return abc_gates(gates, workspace, stream);
}

// The scan of both memories, whose states are in the workspace.
GatedScan make_forward_scan(const GsaInputs& in, const OutputTensor<4>& final_k,
                            const OutputTensor<4>& final_v, Workspace& workspace) {
  GatedScan scan = make_scan(in.shape, false, in.g, new_states(in.shape, workspace));
  scan.memory[0] = {in.k, in.s, in.initial[0], final_k, in.shape.D};
  scan.memory[1] = {in.v, in.s, in.initial[1], final_v, in.shape.V};
  return scan;
}

// [B, T, HQ, M] fp32 without gaps, as fp32_feature needs it.
OutputTensor<4> new_dense_rows(const GsaShape& shape, Workspace& workspace) {
  const int64_t M = shape.M, token = shape.query_heads * M, row = shape.tokens.tokens * token;
  return {workspace.array<float>(shape.tokens.batch * row), DType::f32, {row, token, M, 1}};
}

// z <- p, and in backward dp <- dz, with w.
cudaError_t launch_feature(const GsaShape& shape, const OutputTensor<4>& z, const OutputTensor<4>& dp,
                           const OutputTensor<4>& w, cudaStream_t stream) {
  const int64_t rows = shape.tokens.batch * shape.tokens.tokens * shape.query_heads;
  return fp32_feature({rows, shape.M, shape.slots, shape.feature, shape.scale, static_cast<float*>(z.data),
                       static_cast<float*>(dp.data), static_cast<float*>(w.data)},
                      stream);
}

// The gradients of query rows, and the tensors that later launches read.
struct QueryRows {
  OutputTensor<4> p, dz, w;  // [B, T, HQ, M] fp32
};

cudaError_t compute_dq(const GsaFp32Backward& p, const GsaInputs& in, const GatedScan& scan,
                       const QueryRows& rows, cudaStream_t stream) {
  const GsaShape& shape = in.shape;
  const Fp32ReadShape read = make_read_shape(shape, false, in.g, scan.states);
  GIRIH_TRY(fp32_value_read({read, {{in.q, in.k, in.s, 0, shape.D}, {}}, rows.p}, stream));
  GIRIH_TRY(fp32_value_read({read, {{p.dout, in.v, in.s, shape.D, shape.V}, {}}, rows.dz}, stream));
  GIRIH_TRY(launch_feature(shape, rows.p, rows.dz, rows.w, stream));
  return fp32_key_read({read, as_input(rows.dz), in.s, in.k, 0, shape.D, p.dq}, stream);
}

// The gradients of key rows, with ds.
cudaError_t compute_dkv(const GsaFp32Backward& p, const GsaInputs& in, const GatedScan& reverse,
                        const QueryRows& rows, const OutputTensor<4>& ds, cudaStream_t stream) {
  const GsaShape& shape = in.shape;
  const InputTensor<4> dz = as_input(rows.dz), y = as_input(rows.p);
  const Fp32ReadShape write = make_read_shape(shape, true, in.g, reverse.states);
  GIRIH_TRY(fp32_key_read({write, in.s, dz, in.q, 0, shape.D, p.dk}, stream));
  GIRIH_TRY(fp32_key_read({write, in.s, y, p.dout, shape.D, shape.V, p.dv}, stream));
  return fp32_value_read({write, {{in.k, in.q, dz, 0, shape.D}, {in.v, p.dout, y, shape.D, shape.V}}, ds},
                         stream);
}

}  // namespace

cudaError_t gsa_fp32_forward(const GsaFp32Forward& p, Workspace& workspace, cudaStream_t stream) {
  GsaInputs in;
  GIRIH_TRY(compute_gates(p.inputs, p.final_z, in, workspace, stream));
  const GsaShape& shape = in.shape;
  const GatedScan scan = make_forward_scan(in, p.final[0], p.final[1], workspace);
  GIRIH_TRY(fp32_scan(scan, workspace, stream));
  const Fp32ReadShape read = make_read_shape(shape, false, in.g, scan.states);
  const OutputTensor<4> y = new_dense_rows(shape, workspace);
  GIRIH_TRY(fp32_value_read({read, {{in.q, in.k, in.s, 0, shape.D}, {}}, y}, stream));
  GIRIH_TRY(launch_feature(shape, y, {}, {}, stream));
  return fp32_key_read({read, as_input(y), in.s, in.v, shape.D, shape.V, p.o}, stream);
}

cudaError_t gsa_fp32_backward(const GsaFp32Backward& p, Workspace& workspace, cudaStream_t stream) {
  const GsaShape& shape = p.inputs.gated.shape;
  GsaInputs in;
  GIRIH_TRY(compute_gates(p.inputs, {}, in, workspace, stream));

  // The states again: in fp32 they would be the largest saved tensor.
  const GatedScan scan = make_forward_scan(in, state_or_new({}, shape.D, shape, workspace),
                                           state_or_new({}, shape.V, shape, workspace), workspace);
  GIRIH_TRY(fp32_scan(scan, workspace, stream));
  const QueryRows rows{new_dense_rows(shape, workspace), new_dense_rows(shape, workspace),
                       new_dense_rows(shape, workspace)};
  GIRIH_TRY(compute_dq(p, in, scan, rows, stream));

  GatedScan reverse = make_scan(shape, true, in.g, new_states(shape, workspace));
  reverse.memory[0] = {in.q, as_input(rows.dz), p.dfinal[0],
                       state_or_new(p.dinitial[0], shape.D, shape, workspace), shape.D};
  reverse.memory[1] = {p.dout, as_input(rows.p), p.dfinal[1],
                       state_or_new(p.dinitial[1], shape.V, shape, workspace), shape.V};
  GIRIH_TRY(fp32_scan(reverse, workspace, stream));
  const OutputTensor<4> ds = p.ds.data != nullptr ? p.ds : new_key_rows(shape, workspace);
  GIRIH_TRY(compute_dkv(p, in, reverse, rows, ds, stream));

  Fp32GateGradient gates = make_gate_gradient(shape, scan, reverse);
  gates.w = as_input(rows.w), gates.s = in.s, gates.ds = as_input(ds);
  if (p.is_s_derived) gates.g = in.g;
  gates.dg = p.dg.data != nullptr ? p.dg : new_key_rows(shape, workspace);
  GIRIH_TRY(fp32_gate_gradient(gates, stream));
  if (!p.inputs.is_abc) return cudaSuccess;
  return abc_gradient({shape.tokens, shape.heads, shape.slots, in.s, in.g, as_input(ds), as_input(gates.dg),
                       p.dfinal_z, p.inputs.initial_z, p.dlogits, p.dinitial_z},
                      workspace, stream);
}

}  // namespace girih::kernels

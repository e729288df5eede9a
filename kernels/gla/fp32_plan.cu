// gla_fp32_forward and gla_fp32_backward: the launches.
#include "fp32/plan.h"
#include "gla/gla.h"

namespace girih::kernels {
namespace {

// The scan of S, whose states are in the workspace.
GatedScan make_forward_scan(const GlaInputs& in, const OutputTensor<4>& final, Workspace& workspace) {
  GatedScan scan = make_scan(in.shape, false, in.g, new_states(in.shape, workspace));
  scan.memory[1] = {in.v, in.k, in.initial, final, in.shape.V};
  return scan;
}

}  // namespace

cudaError_t gla_fp32_forward(const GlaFp32Forward& p, Workspace& workspace, cudaStream_t stream) {
  const GlaInputs& in = p.inputs;
  const GatedScan scan = make_forward_scan(in, p.final, workspace);
  GIRIH_TRY(fp32_scan(scan, workspace, stream));
  const Fp32ReadShape read = make_read_shape(in.shape, false, in.g, scan.states);
  return fp32_key_read({read, in.q, in.k, in.v, 0, in.shape.V, p.o}, stream);
}

cudaError_t gla_fp32_backward(const GlaFp32Backward& p, Workspace& workspace, cudaStream_t stream) {
  const GlaInputs& in = p.inputs;
  const GsaShape& shape = in.shape;
  const GatedScan scan = make_forward_scan(in, state_or_new({}, shape.V, shape, workspace), workspace);
  GIRIH_TRY(fp32_scan(scan, workspace, stream));
  const Fp32ReadShape read = make_read_shape(shape, false, in.g, scan.states);
  GIRIH_TRY(fp32_value_read({read, {{p.dout, in.v, in.k, 0, shape.V}, {}}, p.dq}, stream));

  GatedScan reverse = make_scan(shape, true, in.g, new_states(shape, workspace));
  const OutputTensor<4> dinitial = state_or_new(p.dinitial, shape.V, shape, workspace);
  reverse.memory[1] = {p.dout, in.q, p.dfinal, dinitial, shape.V};
  GIRIH_TRY(fp32_scan(reverse, workspace, stream));
  const Fp32ReadShape write = make_read_shape(shape, true, in.g, reverse.states);
  GIRIH_TRY(fp32_value_read({write, {{in.v, p.dout, in.q, 0, shape.V}, {}}, p.dk}, stream));
  GIRIH_TRY(fp32_key_read({write, in.k, in.q, p.dout, 0, shape.V, p.dv}, stream));

  if (p.dg.data == nullptr) return cudaSuccess;
  Fp32GateGradient gates = make_gate_gradient(shape, scan, reverse);
  gates.w = in.q, gates.w_factor = as_input(p.dq);
  gates.s = in.k, gates.ds = as_input(p.dk);
  gates.dg = p.dg;
  return fp32_gate_gradient(gates, stream);
}

}  // namespace girih::kernels

// gla_forward and gla_backward, for a gate for each channel: the launches, and the choice of the instances.
#include "gla/gla.h"
#include "gla/kernels.h"
#include "gsa/instance.h"
#include "gsa/kernels.h"
#include "gsa/plan.h"

namespace girih::kernels {
namespace {

cudaError_t launch_output(const GlaOutput& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gla_output<decltype(element), slots()>(p, stream);
  });
}
cudaError_t launch_dq(const GlaDq& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gla_dq<decltype(element), slots()>(p, stream);
  });
}
cudaError_t launch_dkv(const GatedDkv& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gated_dkv<decltype(element), slots(), 1>(p, stream);
  });
}

}  // namespace

// The plans of gsa need more shared memory.
cudaError_t gla_fits(int D, bool& fits) { return gsa_fits(D, fits); }

cudaError_t gla_forward(const GlaForward& p, Workspace& workspace, cudaStream_t stream) {
  const GlaInputs& in = p.inputs;
  void* const states = p.states != nullptr ? p.states : new_states(in.shape, workspace);
  GatedScan scan = make_scan(in.shape, false, in.g, states);
  scan.memory[1] = {in.v, in.k, in.initial, p.final, in.shape.V};
  GIRIH_TRY(gated_scan(scan, workspace, stream));
  return launch_output({in.shape, in.q, in.k, in.v, in.g, states, p.o}, stream);
}

cudaError_t gla_backward(const GlaBackward& p, Workspace& workspace, cudaStream_t stream) {
  const GlaInputs& in = p.inputs;
  const GsaShape& shape = in.shape;
  const GateGradientTerms gate_terms = new_gate_terms(shape, workspace);
  const OutputTensor<4> q_scan = new_query_rows(shape.dtype, shape, workspace);
  const GlaDq dq{shape, in.q, in.k, in.v, in.g, p.states, p.dout, p.dq, gate_terms, q_scan};
  GIRIH_TRY(launch_dq(dq, stream));

  const OutputTensor<4> dinitial = state_or_new(p.dinitial, shape.V, shape, workspace);
  GatedScan scan = make_scan(shape, true, in.g, new_states(shape, workspace));
  scan.is_factored = gate_terms.is_factored;
  scan.memory[1] = {p.dout, as_input(q_scan), p.dfinal, dinitial, shape.V};
  GIRIH_TRY(gated_scan(scan, workspace, stream));

  GatedDkv dkv{};
  dkv.shape = shape;
  dkv.s = in.k, dkv.g = in.g, dkv.w = as_input(gate_terms.w);
  dkv.memory[1] = {in.v, p.dout, in.q, as_input(q_scan), in.initial, as_input(dinitial), p.dv, shape.V};
  dkv.y_scale = shape.scale;
  dkv.states = p.states, dkv.gradients = scan.states;
  dkv.ds = p.dk, dkv.dg = p.dg;
  return launch_dkv(dkv, stream);
}

}  // namespace girih::kernels

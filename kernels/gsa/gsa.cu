// gsa_forward and gsa_backward: the launches, and the choice of the instances.
#include "gsa/gsa.h"
#include "gsa/instance.h"
#include "gsa/kernels.h"
#include "gsa/plan.h"

namespace girih::kernels {
namespace {

cudaError_t launch_output(const GsaOutput& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gsa_output<decltype(element), slots()>(p, stream);
  });
}
cudaError_t launch_dq(const GsaDq& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gsa_dq<decltype(element), slots()>(p, stream);
  });
}
cudaError_t launch_dkv(const GatedDkv& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gated_dkv<decltype(element), slots(), 2>(p, stream);
  });
}

}  // namespace

cudaError_t gsa_forward(const GsaForward& p, Workspace& workspace, cudaStream_t stream) {
  const GsaInputs& in = p.inputs;
  void* const states = p.states != nullptr ? p.states : new_states(in.shape, workspace);
  GatedScan scan = make_scan(in.shape, false, in.g, states);
  scan.memory[0] = {in.k, in.s, in.initial[0], p.final[0], in.shape.D};
  scan.memory[1] = {in.v, in.s, in.initial[1], p.final[1], in.shape.V};
  GIRIH_TRY(gated_scan(scan, workspace, stream));
  return launch_output({in.shape, in.q, in.k, in.v, in.s, in.g, states, p.o}, stream);
}

cudaError_t gsa_backward(const GsaBackward& p, Workspace& workspace, cudaStream_t stream) {
  const GsaInputs& in = p.inputs;
  const GsaShape& shape = in.shape;

  const auto new_rows = [&] { return new_query_rows(shape.dtype, shape, workspace); };
  const GateGradientTerms gate_terms = new_gate_terms(shape, workspace);
  const GsaDq dq{shape,  in.q, in.k,       in.v,       in.s,       in.g,       p.states,
                 p.dout, p.dq, gate_terms, new_rows(), new_rows(), new_rows(), new_rows()};
  GIRIH_TRY(launch_dq(dq, stream));

  const OutputTensor<4> dinitial[2] = {state_or_new(p.dinitial[0], shape.D, shape, workspace),
                                       state_or_new(p.dinitial[1], shape.V, shape, workspace)};
  GatedScan scan = make_scan(shape, true, in.g, new_states(shape, workspace));
  scan.is_factored = gate_terms.is_factored;
  scan.memory[0] = {in.q, as_input(dq.dz_scan), p.dfinal[0], dinitial[0], shape.D};
  scan.memory[1] = {p.dout, as_input(dq.p_scan), p.dfinal[1], dinitial[1], shape.V};
  GIRIH_TRY(gated_scan(scan, workspace, stream));

  GatedDkv dkv{};
  dkv.shape = shape;
  dkv.s = in.s, dkv.g = in.g, dkv.w = as_input(gate_terms.w);
  dkv.memory[0] = {in.k, in.q,   as_input(dq.dz), as_input(dq.dz_scan), in.initial[0], as_input(dinitial[0]),
                   p.dk, shape.D};
  dkv.memory[1] = {in.v, p.dout, as_input(dq.p), as_input(dq.p_scan), in.initial[1], as_input(dinitial[1]),
                   p.dv, shape.V};
  dkv.y_scale = 1;
  dkv.states = p.states, dkv.gradients = scan.states;
  dkv.ds = p.ds, dkv.dg = p.dg;
  return launch_dkv(dkv, stream);
}

}  // namespace girih::kernels

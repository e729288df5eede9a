// The plans of gsa on the emulator, for test_emulated_gsa.py, which fills a Call or a Step.
#include "gated.h"

using namespace gated;

struct Call {
  Gated gated;
  int64_t is_s_tied;  // s = 1 - e^g; the fp32 plans read s from an array in this case too
  Array logits, first_z, last_z, dlast_z, dlogits, dfirst_z;  // of ABC
};

struct Step {
  int64_t sequences, heads, query_heads, D, V, M, feature;
  double scale;
  Array q, k, v, s, g, state[2], z, o;
};

namespace {

GsaInputs make_inputs(const Gated& c) {
  return {make_shape(c),
          as_input<4>(c.q),
          as_input<4>(c.k),
          as_input<4>(c.v),
          as_input<4>(c.s),
          as_input<4>(c.g),
          {as_input<4>(c.initial[0]), as_input<4>(c.initial[1])}};
}

// The fields that GsaBackward and GsaFp32Backward have in common. The gradients of absent initial states stay
// in the workspace.
template <class Backward>
void fill_backward(const Gated& c, Backward& p) {
  p.dout = as_input<4>(c.dout);
  p.dq = as_output<4>(c.dq), p.dk = as_output<4>(c.dk), p.dv = as_output<4>(c.dv);
  p.ds = as_output<4>(c.ds), p.dg = as_output<4>(c.dg);
  for (int i = 0; i < 2; ++i) {
    p.dfinal[i] = as_input<4>(c.dlast[i]);
    if (c.initial[i].data != nullptr) p.dinitial[i] = as_output<4>(c.dinitial[i]);
  }
}

void run_tensor_cores(const Gated& c) {
  Buffers saved;
  GsaForward forward{};
  forward.inputs = make_inputs(c);
  // A call with backward, which saves the states.
  forward.states = allocate_states(c, saved);
  forward.o = saved.tensor(forward.inputs.shape.dtype, c.batch, c.tokens, c.query_heads, c.V);
  run_plan(gsa_forward, forward);
  GsaBackward backward{};
  backward.inputs = forward.inputs, backward.states = forward.states;
  fill_backward(c, backward);
  run_plan(gsa_backward, backward);
  // A call without backward. The test checks its results.
  forward.states = nullptr, forward.o = as_output<4>(c.o);
  for (int i = 0; i < 2; ++i) forward.final[i] = as_output<4>(c.last[i]);
  run_plan(gsa_forward, forward);
}

void run_fp32(const Call& call) {
  const Gated& c = call.gated;
  GsaFp32Forward forward{};
  forward.inputs = {make_inputs(c), call.last_z.data != nullptr, as_input<4>(call.logits),
                    as_input<3>(call.first_z)};
  forward.o = as_output<4>(c.o);
  for (int i = 0; i < 2; ++i) forward.final[i] = as_output<4>(c.last[i]);
  forward.final_z = as_output<3>(call.last_z);
  run_plan(gsa_fp32_forward, forward);

  GsaFp32Backward backward{};
  backward.inputs = forward.inputs;
  backward.is_s_derived = call.is_s_tied;
  fill_backward(c, backward);
  backward.dfinal_z = as_input<3>(call.dlast_z);
  backward.dlogits = as_output<4>(call.dlogits), backward.dinitial_z = as_output<3>(call.dfirst_z);
  run_plan(gsa_fp32_backward, backward);
}

}  // namespace

extern "C" void run(const Call* c) {
  const EmulatedDevice device(c->gated);
  c->gated.use_fp32 ? run_fp32(*c) : run_tensor_cores(c->gated);
}
extern "C" void step(const Step* c) {
  GsaStep p{};
  p.sequences = c->sequences;
  p.heads = static_cast<int>(c->heads), p.query_heads = static_cast<int>(c->query_heads);
  p.D = static_cast<int>(c->D), p.V = static_cast<int>(c->V), p.M = static_cast<int>(c->M);
  p.feature = static_cast<Feature>(c->feature), p.scale = static_cast<float>(c->scale);
  p.q = as_input<3>(c->q), p.k = as_input<3>(c->k), p.v = as_input<3>(c->v), p.s = as_input<3>(c->s),
  p.g = as_input<3>(c->g);
  p.state_k = as_output<4>(c->state[0]), p.state_v = as_output<4>(c->state[1]);
  p.z = as_output<3>(c->z), p.o = as_output<3>(c->o);
  check_launch(gsa_step(p, nullptr));
}

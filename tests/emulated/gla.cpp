// The plans of gla on the emulator, for test_emulated_gla.py, which fills a Call or a Step. M and V
// are the padded widths of keys and values; slots and Call::values are the widths without padding.
#include "gla/gla.h"

#include "gated.h"

using namespace gated;

struct Call {
  Gated gated;
  int64_t use_head_kernels;  // one gate per head, or no gate
  int64_t key_share, query_share, values;
};

struct Step {
  int64_t sequences, heads, query_heads, key_share, query_share, D, V;
  double scale;
  Array q, k, v, g, state, o;
};

namespace {

GlaInputs make_inputs(const Gated& c) {
  return {make_shape(c),    as_input<4>(c.q), as_input<4>(c.k),
          as_input<4>(c.v), as_input<4>(c.g), as_input<4>(c.initial[1])};
}
GlaHeadInputs make_head_inputs(const Call& call) {
  const Gated& c = call.gated;
  HeadShape shape{};
  shape.tokens = make_layout(c);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.key_share = static_cast<int>(call.key_share), shape.query_share = static_cast<int>(call.query_share);
  shape.D = static_cast<int>(c.M), shape.V = static_cast<int>(c.V);
  shape.keys = static_cast<int>(c.slots), shape.values = static_cast<int>(call.values);
  shape.dtype = static_cast<DType>(c.q.dtype), shape.scale = static_cast<float>(c.scale);
  shape.g = as_input<3>(c.g);
  return {shape, as_input<4>(c.q), as_input<4>(c.k), as_input<4>(c.v), as_input<4>(c.initial[1])};
}

// The fields that the problems of backward have in common. The gradient of an absent initial state stays in
// the workspace.
template <class Backward>
void fill_backward(const Gated& c, Backward& p) {
  p.dout = as_input<4>(c.dout), p.dfinal = as_input<4>(c.dlast[1]);
  p.dq = as_output<4>(c.dq), p.dk = as_output<4>(c.dk), p.dv = as_output<4>(c.dv);
  p.dg = to_tensor<OutputTensor, sizeof(p.dg.stride) / sizeof(int64_t)>(c.dg);
  if (c.initial[1].data != nullptr) p.dinitial = as_output<4>(c.dinitial[1]);
}

// Runs forward as a call with backward, which saves the states, then backward, then forward as a call without
// backward, whose results the test checks.
template <class Forward, class Backward, class Inputs>
void run_both(const Gated& c, cudaError_t (*forward_plan)(const Forward&, Workspace&, cudaStream_t),
              cudaError_t (*backward_plan)(const Backward&, Workspace&, cudaStream_t), const Inputs& inputs) {
  Buffers saved;
  Forward forward{};
  forward.inputs = inputs;
  forward.states = allocate_states(c, saved);
  forward.o = saved.tensor(inputs.shape.dtype, c.batch, c.tokens, c.query_heads, c.V);
  run_plan(forward_plan, forward);
  Backward backward{};
  backward.inputs = inputs, backward.states = forward.states;
  fill_backward(c, backward);
  run_plan(backward_plan, backward);
  forward.states = nullptr;
  forward.final = as_output<4>(c.last[1]), forward.o = as_output<4>(c.o);
  run_plan(forward_plan, forward);
}

// q contains scale.
void run_fp32(const Gated& c) {
  GlaFp32Forward forward{};
  forward.inputs = make_inputs(c);
  forward.final = as_output<4>(c.last[1]), forward.o = as_output<4>(c.o);
  run_plan(gla_fp32_forward, forward);
  GlaFp32Backward backward{};
  backward.inputs = forward.inputs;
  fill_backward(c, backward);
  run_plan(gla_fp32_backward, backward);
}

}  // namespace

extern "C" void run(const Call* c) {
  const EmulatedDevice device(c->gated);
  if (c->use_head_kernels) {
    run_both(c->gated, gla_head_forward, gla_head_backward, make_head_inputs(*c));
  } else if (c->gated.use_fp32) {
    run_fp32(c->gated);
  } else {
    run_both(c->gated, gla_forward, gla_backward, make_inputs(c->gated));
  }
}
// Whether the plans with a gate per head support D key channels with this much shared memory.
extern "C" int fits(int D, int shared) {
  emulated::shared_bytes = shared;
  bool fits = false;
  check_launch(gla_head_fits(D, fits));
  emulated::shared_bytes = emulated::kSharedBytes;
  return fits;
}
extern "C" void step(const Step* c) {
  GlaStep p{};
  p.sequences = c->sequences;
  p.heads = static_cast<int>(c->heads), p.query_heads = static_cast<int>(c->query_heads);
  p.key_share = static_cast<int>(c->key_share), p.query_share = static_cast<int>(c->query_share);
  p.D = static_cast<int>(c->D), p.V = static_cast<int>(c->V), p.scale = static_cast<float>(c->scale);
  p.q = as_input<3>(c->q), p.k = as_input<3>(c->k), p.v = as_input<3>(c->v), p.g = as_input<3>(c->g);
  p.state = as_output<4>(c->state), p.o = as_output<3>(c->o);
  check_launch(gla_step(p, nullptr));
}

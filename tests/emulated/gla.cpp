// The kernels of gla on the emulator, for test_emulated_gla.py, which fills a Call or a Step. M and V
// are the padded widths of keys and values; slots and Call::values are the widths without padding.
#include "gla/gla.h"

#include "gated.h"
#include "gla/head.h"

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

void run_head_kernels(const Call& call) {
  const Gated& c = call.gated;
  Buffers buffers;
  HeadShape shape{};
  shape.tokens = make_layout(c);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.key_share = static_cast<int>(call.key_share), shape.query_share = static_cast<int>(call.query_share);
  shape.D = static_cast<int>(c.M), shape.V = static_cast<int>(c.V);
  shape.keys = static_cast<int>(c.slots), shape.values = static_cast<int>(call.values);
  shape.dtype = static_cast<DType>(c.q.dtype), shape.scale = static_cast<float>(c.scale);
  shape.g = as_input<3>(c.g);

  const int64_t state_bytes = token_range_count(shape.tokens, kHeadPair) * c.V * c.M * 2;
  void* const states = buffers.bytes(state_bytes * c.heads);
  void* const gradients = buffers.bytes(state_bytes * c.query_heads);
  const auto read = [&](HeadRead p) {
    p.shape = shape;
    p.workspace = buffers.bytes(head_read_workspace(p));
    check_launch(head_read(p, nullptr));
  };
  HeadRead forward{};
  forward.q = as_input<4>(c.q), forward.k = as_input<4>(c.k), forward.v = as_input<4>(c.v);
  forward.initial = as_input<4>(c.initial[1]);
  // The read of a call with backward, which saves the states.
  auto saving = forward;
  saving.o = buffers.tensor(shape.dtype, c.batch, c.tokens, c.query_heads, c.V), saving.states = states;
  read(saving);
  // The read of a call without backward. The test checks its results.
  forward.final = as_output<4>(c.last[1]), forward.o = as_output<4>(c.o);
  read(forward);

  HeadRead reverse{};
  reverse.reverse = true;
  reverse.q = as_input<4>(c.k), reverse.k = as_input<4>(c.q), reverse.v = as_input<4>(c.dout);
  reverse.initial = as_input<4>(c.dlast[1]), reverse.final = as_output<4>(c.dinitial[1]);
  reverse.o = as_output<4>(c.dv), reverse.states = gradients;
  read(reverse);

  HeadGradients p{};
  p.shape = shape;
  p.q = as_input<4>(c.q), p.k = as_input<4>(c.k), p.v = as_input<4>(c.v), p.dout = as_input<4>(c.dout);
  p.states = states, p.gradients = gradients;
  p.initial = as_input<4>(c.initial[1]), p.dinitial = as_input<4>(c.dinitial[1]);
  p.dq = as_output<4>(c.dq), p.dk = as_output<4>(c.dk), p.dg = as_output<3>(c.dg);
  check_launch(head_gradient_tile(shape.D, p.tile));
  if (p.dg.data != nullptr) {
    const int64_t token_bytes = c.query_heads * p.tiles() * 4;
    p.dg_parts = static_cast<float*>(buffers.bytes(c.batch * c.tokens * token_bytes));
    p.partner_gate_terms =
        static_cast<float*>(buffers.bytes(token_range_count(shape.tokens, kChunk) * token_bytes));
  }
  check_launch(head_gradients(p, nullptr));
}

void run_channel_kernels(const Gated& c) {
  Buffers buffers;
  const GsaShape shape = make_shape(c);
  const InputTensor<4> q = as_input<4>(c.q), k = as_input<4>(c.k), v = as_input<4>(c.v), g = as_input<4>(c.g),
                       dout = as_input<4>(c.dout);
  void* const states = allocate_states(c, buffers);
  run_scan(c, false, {{}, {v, k}}, nullptr, states, buffers);
  check_launch(gla_output({shape, q, k, v, g, states, as_output<4>(c.o)}, nullptr));

  const OutputTensor<4> q_scan = buffers.tensor(shape.dtype, c.batch, c.tokens, c.query_heads, c.M);
  const GateGradientTerms gate_terms = make_gate_terms(c, buffers);
  check_launch(gla_dq({shape, q, k, v, g, states, dout, as_output<4>(c.dq), gate_terms, q_scan}, nullptr));

  void* const gradients = allocate_states(c, buffers);
  run_scan(c, true, {{}, {dout, as_input(q_scan)}}, gate_terms.is_factored, gradients, buffers);

  GatedDkv dkv{};
  dkv.shape = shape, dkv.s = k, dkv.g = g, dkv.w = as_input(gate_terms.w);
  dkv.memory[1] = {v,
                   dout,
                   q,
                   as_input(q_scan),
                   as_input<4>(c.initial[1]),
                   as_input<4>(c.dinitial[1]),
                   as_output<4>(c.dv),
                   shape.V};
  dkv.y_scale = shape.scale, dkv.states = states, dkv.gradients = gradients;
  dkv.ds = as_output<4>(c.dk), dkv.dg = as_output<4>(c.dg);
  check_launch(gla_dkv(dkv, nullptr));
}

// The fp32 kernels. q is already scaled, and s is k in fp32.
void run_fp32_kernels(const Gated& c) {
  Buffers buffers;
  const int V = static_cast<int>(c.V);
  const InputTensor<4> q = as_input<4>(c.q), k = as_input<4>(c.k), v = as_input<4>(c.v),
                       dout = as_input<4>(c.dout);
  void* const states = allocate_states(c, buffers);
  run_scan(c, false, {{}, {v, k}}, nullptr, states, buffers);
  const Fp32Reads forward(c, states, false);
  forward.read_keys(as_output<4>(c.o), q, k, v, 0, V);
  forward.read_values(as_output<4>(c.dq), {dout, v, k, 0, V});

  void* const gradients = allocate_states(c, buffers);
  run_scan(c, true, {{}, {dout, q}}, nullptr, gradients, buffers);
  const Fp32Reads reverse(c, gradients, true);
  reverse.read_values(as_output<4>(c.dk), {v, dout, q, 0, V});
  reverse.read_keys(as_output<4>(c.dv), k, q, dout, 0, V);

  const OutputTensor<4> w = buffers.tensor(DType::f32, c.batch, c.tokens, c.query_heads, c.M);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t h = 0; h < c.query_heads; ++h) {
        const auto row = [&](const auto& x) {
          return static_cast<float*>(const_cast<void*>(static_cast<const void*>(x.data))) + b * x.stride[0] +
                 t * x.stride[1] + h * x.stride[2];
        };
        for (int64_t m = 0; m < c.M; ++m) row(w)[m] = row(q)[m] * row(c.dq)[m];
      }
    }
  }
  run_fp32_gate_gradient(c, as_input(w), as_input<4>(c.s), as_input<4>(c.dk), false, states, gradients);
}

}  // namespace

extern "C" void run(const Call* c) {
  const EmulatedDevice device(c->gated);
  if (c->use_head_kernels) {
    run_head_kernels(*c);
  } else {
    c->gated.use_fp32 ? run_fp32_kernels(c->gated) : run_channel_kernels(c->gated);
  }
}
// Whether the head kernels support D key channels with this much shared memory.
extern "C" int fits(int D, int shared) {
  emulated::shared_bytes = shared;
  bool fits = false;
  check_launch(head_fits(D, fits));
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

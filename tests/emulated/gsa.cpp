// The kernels of gsa on the emulator, for test_emulated_gsa.py, which fills a Call or a Step.
#include "gated.h"

using namespace gated;

struct Call {
  Gated gated;
  int64_t is_s_tied;  // s = 1 - e^g; the fp32 kernels read s from an array in this case too
  // ABC computes s and g from the logits, and dlogits from ds and dg.
  Array logits, first_z, last_z, dlast_z, dlogits, dfirst_z;
};

struct Step {
  int64_t sequences, heads, query_heads, D, V, M, feature;
  double scale;
  Array q, k, v, s, g, state[2], z, o;
};

namespace {

void run_tensor_core_kernels(const Gated& c) {
  Buffers buffers;
  const GsaShape shape = make_shape(c);
  const InputTensor<4> q = as_input<4>(c.q), k = as_input<4>(c.k), v = as_input<4>(c.v), s = as_input<4>(c.s),
                       g = as_input<4>(c.g), dout = as_input<4>(c.dout);
  void* const states = allocate_states(c, buffers);
  run_scan(c, false, {{k, s}, {v, s}}, nullptr, states, buffers);
  check_launch(gsa_output({shape, q, k, v, s, g, states, as_output<4>(c.o)}, nullptr));

  const auto make_rows = [&] { return buffers.tensor(shape.dtype, c.batch, c.tokens, c.query_heads, c.M); };
  const OutputTensor<4> p = make_rows(), dz = make_rows(), p_scan = make_rows(), dz_scan = make_rows();
  const GateGradientTerms gate_terms = make_gate_terms(c, buffers);
  check_launch(gsa_dq(
      {shape, q, k, v, s, g, states, dout, as_output<4>(c.dq), gate_terms, p, dz, p_scan, dz_scan}, nullptr));

  void* const gradients = allocate_states(c, buffers);
  run_scan(c, true, {{q, as_input(dz_scan)}, {dout, as_input(p_scan)}}, gate_terms.is_factored, gradients,
           buffers);

  GatedDkv dkv{};
  dkv.shape = shape, dkv.s = s, dkv.g = g, dkv.w = as_input(gate_terms.w);
  dkv.memory[0] = {k,
                   q,
                   as_input(dz),
                   as_input(dz_scan),
                   as_input<4>(c.initial[0]),
                   as_input<4>(c.dinitial[0]),
                   as_output<4>(c.dk),
                   shape.D};
  dkv.memory[1] = {v,
                   dout,
                   as_input(p),
                   as_input(p_scan),
                   as_input<4>(c.initial[1]),
                   as_input<4>(c.dinitial[1]),
                   as_output<4>(c.dv),
                   shape.V};
  dkv.y_scale = 1, dkv.states = states, dkv.gradients = gradients;
  dkv.ds = as_output<4>(c.ds), dkv.dg = as_output<4>(c.dg);
  check_launch(gsa_dkv(dkv, nullptr));
}

void run_fp32_kernels(const Call& call) {
  const Gated& c = call.gated;
  Buffers buffers;
  const bool has_abc = call.last_z.data != nullptr;
  const int heads = static_cast<int>(c.heads), slots = static_cast<int>(c.slots);
  void* const workspace = buffers.bytes(abc_workspace(make_layout(c), heads, slots));
  if (has_abc) {
    check_launch(abc_gates({make_layout(c), heads, slots, as_input<4>(call.logits), as_input<3>(call.first_z),
                            as_output<4>(c.s), as_output<4>(c.g), as_output<3>(call.last_z), workspace},
                           nullptr));
  }
  const int D = static_cast<int>(c.D), V = static_cast<int>(c.V);
  const InputTensor<4> q = as_input<4>(c.q), k = as_input<4>(c.k), v = as_input<4>(c.v), s = as_input<4>(c.s),
                       dout = as_input<4>(c.dout);
  void* const states = allocate_states(c, buffers);
  run_scan(c, false, {{k, s}, {v, s}}, nullptr, states, buffers);
  const Fp32Reads forward(c, states, false);

  // fp32_feature() needs contiguous rows.
  const int64_t rows = c.batch * c.tokens * c.query_heads;
  const auto make_rows = [&] {
    const int64_t token_stride = c.query_heads * c.M;
    return OutputTensor<4>{
        buffers.bytes(rows * c.M * 4), DType::f32, {c.tokens * token_stride, token_stride, c.M, 1}};
  };
  const auto feature = [&](const OutputTensor<4>& z, void* dp, void* w) {
    check_launch(fp32_feature(
        {rows, static_cast<int>(c.M), slots, static_cast<Feature>(c.feature), static_cast<float>(c.scale),
         static_cast<float*>(z.data), static_cast<float*>(dp), static_cast<float*>(w)},
        nullptr));
  };
  const OutputTensor<4> forward_p = make_rows();
  forward.read_values(forward_p, {q, k, s, 0, D});
  feature(forward_p, nullptr, nullptr);
  forward.read_keys(as_output<4>(c.o), as_input(forward_p), s, v, c.D, c.V);

  const OutputTensor<4> p = make_rows(), dz = make_rows(), w = make_rows();
  forward.read_values(p, {q, k, s, 0, D}), forward.read_values(dz, {dout, v, s, D, V});
  feature(p, dz.data, w.data);
  forward.read_keys(as_output<4>(c.dq), as_input(dz), s, k, 0, c.D);

  void* const gradients = allocate_states(c, buffers);
  run_scan(c, true, {{q, as_input(dz)}, {dout, as_input(p)}}, nullptr, gradients, buffers);
  const Fp32Reads reverse(c, gradients, true);
  reverse.read_keys(as_output<4>(c.dk), s, as_input(dz), q, 0, c.D);
  reverse.read_keys(as_output<4>(c.dv), s, as_input(p), dout, c.D, c.V);
  reverse.read_values(as_output<4>(c.ds), {k, q, as_input(dz), 0, D}, {v, dout, as_input(p), D, V});
  run_fp32_gate_gradient(c, as_input(w), s, as_input<4>(c.ds), call.is_s_tied, states, gradients);
  if (has_abc) {
    check_launch(abc_gradient({make_layout(c), heads, slots, s, as_input<4>(c.g), as_input<4>(c.ds),
                               as_input<4>(c.dg), as_input<3>(call.dlast_z), as_input<3>(call.first_z),
                               as_output<4>(call.dlogits), as_output<3>(call.dfirst_z), workspace},
                              nullptr));
  }
}

}  // namespace

extern "C" void run(const Call* c) {
  const EmulatedDevice device(c->gated);
  c->gated.use_fp32 ? run_fp32_kernels(*c) : run_tensor_core_kernels(c->gated);
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

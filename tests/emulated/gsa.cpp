// The kernels of gsa on the emulator, for test_emulated_gsa.py, which fills a Call or a Step.
#include "gated.h"

using namespace gated;

struct Call {
  Gated gated;
  int64_t s_of_g;  // of the exact kernels, whose s is an array always
  // ABC: s, g, ds and dg of these.
  Array logits, first_z, last_z, dlast_z, dlogits, dfirst_z;
};

struct Step {
  int64_t sequences, heads, query_heads, D, V, M, feature;
  double scale;
  Array q, k, v, s, g, state[2], z, o;
};

namespace {

void by_tensor_cores(const Gated& c) {
  Rooms room;
  const GsaShape shape = shape_of(c);
  const InputTensor<4> q = in<4>(c.q), k = in<4>(c.k), v = in<4>(c.v), s = in<4>(c.s), g = in<4>(c.g),
                       dout = in<4>(c.dout);
  void* const states = states_of(c, room);
  scan(c, false, {{k, s}, {v, s}}, nullptr, states, room);
  must(gsa_output({shape, q, k, v, s, g, states, out<4>(c.o)}, nullptr));

  const auto rows = [&] { return room(shape.dtype, c.batch, c.tokens, c.query_heads, c.M); };
  const OutputTensor<4> p = rows(), dz = rows(), p_scan = rows(), dz_scan = rows();
  const GateGradientTerms left = left_by_rows(c, room);
  must(gsa_dq({shape, q, k, v, s, g, states, dout, out<4>(c.dq), left, p, dz, p_scan, dz_scan}, nullptr));

  void* const gradients = states_of(c, room);
  scan(c, true, {{q, written(dz_scan)}, {dout, written(p_scan)}}, left.is_factored, gradients, room);

  GatedDkv columns{};
  columns.shape = shape, columns.s = s, columns.g = g, columns.w = written(left.w);
  columns.memory[0] = {
      k, q, written(dz), written(dz_scan), in<4>(c.initial[0]), in<4>(c.dinitial[0]), out<4>(c.dk), shape.D};
  columns.memory[1] = {
      v, dout, written(p), written(p_scan), in<4>(c.initial[1]), in<4>(c.dinitial[1]), out<4>(c.dv), shape.V};
  columns.y_scale = 1, columns.states = states, columns.gradients = gradients;
  columns.ds = out<4>(c.ds), columns.dg = out<4>(c.dg);
  must(gsa_dkv(columns, nullptr));
}

void by_exact_kernels(const Call& call) {
  const Gated& c = call.gated;
  Rooms room;
  const bool abc = call.last_z.data != nullptr;
  const int heads = static_cast<int>(c.heads), slots = static_cast<int>(c.slots);
  void* const workspace = room.bytes(abc_workspace(tokens_of(c), heads, slots));
  if (abc) {
    must(abc_gates({tokens_of(c), heads, slots, in<4>(call.logits), in<3>(call.first_z), out<4>(c.s),
                    out<4>(c.g), out<3>(call.last_z), workspace},
                   nullptr));
  }
  const int D = static_cast<int>(c.D), V = static_cast<int>(c.V);
  const InputTensor<4> q = in<4>(c.q), k = in<4>(c.k), v = in<4>(c.v), s = in<4>(c.s), dout = in<4>(c.dout);
  void* const states = states_of(c, room);
  scan(c, false, {{k, s}, {v, s}}, nullptr, states, room);
  const Reads reads(c, states, false);

  // The feature takes rows one after the other.
  const int64_t rows = c.batch * c.tokens * c.query_heads;
  const auto dense = [&] {
    const int64_t by_token = c.query_heads * c.M;
    return OutputTensor<4>{room.bytes(rows * c.M * 4), DType::f32, {c.tokens * by_token, by_token, c.M, 1}};
  };
  const auto feature = [&](const OutputTensor<4>& z, void* dp, void* w) {
    must(fp32_feature(
        {rows, static_cast<int>(c.M), slots, static_cast<Feature>(c.feature), static_cast<float>(c.scale),
         static_cast<float*>(z.data), static_cast<float*>(dp), static_cast<float*>(w)},
        nullptr));
  };
  const OutputTensor<4> only = dense();
  reads.value(only, {q, k, s, 0, D});
  feature(only, nullptr, nullptr);
  reads.key(out<4>(c.o), written(only), s, v, c.D, c.V);

  const OutputTensor<4> p = dense(), dz = dense(), w = dense();
  reads.value(p, {q, k, s, 0, D}), reads.value(dz, {dout, v, s, D, V});
  feature(p, dz.data, w.data);
  reads.key(out<4>(c.dq), written(dz), s, k, 0, c.D);

  void* const gradients = states_of(c, room);
  scan(c, true, {{q, written(dz)}, {dout, written(p)}}, nullptr, gradients, room);
  const Reads writes(c, gradients, true);
  writes.key(out<4>(c.dk), s, written(dz), q, 0, c.D);
  writes.key(out<4>(c.dv), s, written(p), dout, c.D, c.V);
  writes.value(out<4>(c.ds), {k, q, written(dz), 0, D}, {v, dout, written(p), D, V});
  exact_gates(c, written(w), s, in<4>(c.ds), call.s_of_g, states, gradients);
  if (abc) {
    must(abc_gradient(
        {tokens_of(c), heads, slots, s, in<4>(c.g), in<4>(c.ds), in<4>(c.dg), in<3>(call.dlast_z),
         in<3>(call.first_z), out<4>(call.dlogits), out<3>(call.dfirst_z), workspace},
        nullptr));
  }
}

}  // namespace

extern "C" void run(const Call* c) {
  const Card card(c->gated);
  c->gated.exact ? by_exact_kernels(*c) : by_tensor_cores(c->gated);
}
extern "C" void step(const Step* c) {
  GsaStep p{};
  p.sequences = c->sequences;
  p.heads = static_cast<int>(c->heads), p.query_heads = static_cast<int>(c->query_heads);
  p.D = static_cast<int>(c->D), p.V = static_cast<int>(c->V), p.M = static_cast<int>(c->M);
  p.feature = static_cast<Feature>(c->feature), p.scale = static_cast<float>(c->scale);
  p.q = in<3>(c->q), p.k = in<3>(c->k), p.v = in<3>(c->v), p.s = in<3>(c->s), p.g = in<3>(c->g);
  p.state_k = out<4>(c->state[0]), p.state_v = out<4>(c->state[1]);
  p.z = out<3>(c->z), p.o = out<3>(c->o);
  must(gsa_step(p, nullptr));
}

// The kernels of gla on the emulator, for test_emulated_gla.py, which fills a Call or a Step. With a gate a
// head, or none, M are the keys' widths and slots those that exist; values those of V.
#include "gla/gla.h"

#include "gated.h"
#include "gla/head.h"

using namespace gated;

struct Call {
  Gated gated;
  int64_t by_head, key_share, query_share, values;
};

struct Step {
  int64_t sequences, heads, query_heads, key_share, query_share, D, V;
  double scale;
  Array q, k, v, g, state, o;
};

namespace {

void by_head(const Call& call) {
  const Gated& c = call.gated;
  Rooms room;
  HeadShape shape{};
  shape.tokens = tokens_of(c);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.key_share = static_cast<int>(call.key_share), shape.query_share = static_cast<int>(call.query_share);
  shape.D = static_cast<int>(c.M), shape.V = static_cast<int>(c.V);
  shape.keys = static_cast<int>(c.slots), shape.values = static_cast<int>(call.values);
  shape.dtype = static_cast<DType>(c.q.dtype), shape.scale = static_cast<float>(c.scale);
  shape.g = in<3>(c.g);

  const int64_t state_bytes = token_range_count(shape.tokens, kHeadPair) * c.V * c.M * 2;
  void* const states = room.bytes(state_bytes * c.heads);
  void* const gradients = room.bytes(state_bytes * c.query_heads);
  const auto read = [&](HeadRead p) {
    p.shape = shape;
    p.workspace = room.bytes(head_read_workspace(p));
    must(head_read(p, nullptr));
  };
  HeadRead forward{};
  forward.q = in<4>(c.q), forward.k = in<4>(c.k), forward.v = in<4>(c.v);
  forward.initial = in<4>(c.initial[1]);
  auto kept = forward;
  kept.o = room(shape.dtype, c.batch, c.tokens, c.query_heads, c.V), kept.states = states;
  read(kept);
  // Once more, as without backward: what is handed out is looked at after this.
  forward.final = out<4>(c.last[1]), forward.o = out<4>(c.o);
  read(forward);

  HeadRead reverse{};
  reverse.reverse = true;
  reverse.q = in<4>(c.k), reverse.k = in<4>(c.q), reverse.v = in<4>(c.dout);
  reverse.initial = in<4>(c.dlast[1]), reverse.final = out<4>(c.dinitial[1]);
  reverse.o = out<4>(c.dv), reverse.states = gradients;
  read(reverse);

  HeadGradients p{};
  p.shape = shape;
  p.q = in<4>(c.q), p.k = in<4>(c.k), p.v = in<4>(c.v), p.dout = in<4>(c.dout);
  p.states = states, p.gradients = gradients;
  p.initial = in<4>(c.initial[1]), p.dinitial = in<4>(c.dinitial[1]);
  p.dq = out<4>(c.dq), p.dk = out<4>(c.dk), p.dg = out<3>(c.dg);
  must(head_gradient_tile(shape.D, p.tile));
  if (p.dg.data != nullptr) {
    const int64_t each = c.query_heads * p.tiles() * 4;
    p.dg_parts = static_cast<float*>(room.bytes(c.batch * c.tokens * each));
    p.partner_gate_terms = static_cast<float*>(room.bytes(token_range_count(shape.tokens, kChunk) * each));
  }
  must(head_gradients(p, nullptr));
}

void by_channel(const Gated& c) {
  Rooms room;
  const GsaShape shape = shape_of(c);
  const InputTensor<4> q = in<4>(c.q), k = in<4>(c.k), v = in<4>(c.v), g = in<4>(c.g), dout = in<4>(c.dout);
  void* const states = states_of(c, room);
  scan(c, false, {{}, {v, k}}, nullptr, states, room);
  must(gla_output({shape, q, k, v, g, states, out<4>(c.o)}, nullptr));

  const OutputTensor<4> q_scan = room(shape.dtype, c.batch, c.tokens, c.query_heads, c.M);
  const GateGradientTerms left = left_by_rows(c, room);
  must(gla_dq({shape, q, k, v, g, states, dout, out<4>(c.dq), left, q_scan}, nullptr));

  void* const gradients = states_of(c, room);
  scan(c, true, {{}, {dout, written(q_scan)}}, left.is_factored, gradients, room);

  GatedDkv columns{};
  columns.shape = shape, columns.s = k, columns.g = g, columns.w = written(left.w);
  columns.memory[1] = {
      v, dout, q, written(q_scan), in<4>(c.initial[1]), in<4>(c.dinitial[1]), out<4>(c.dv), shape.V};
  columns.y_scale = shape.scale, columns.states = states, columns.gradients = gradients;
  columns.ds = out<4>(c.dk), columns.dg = out<4>(c.dg);
  must(gla_dkv(columns, nullptr));
}

// q is scaled, s the keys in fp32.
void by_exact_kernels(const Gated& c) {
  Rooms room;
  const int V = static_cast<int>(c.V);
  const InputTensor<4> q = in<4>(c.q), k = in<4>(c.k), v = in<4>(c.v), dout = in<4>(c.dout);
  void* const states = states_of(c, room);
  scan(c, false, {{}, {v, k}}, nullptr, states, room);
  const Reads reads(c, states, false);
  reads.key(out<4>(c.o), q, k, v, 0, V);
  reads.value(out<4>(c.dq), {dout, v, k, 0, V});

  void* const gradients = states_of(c, room);
  scan(c, true, {{}, {dout, q}}, nullptr, gradients, room);
  const Reads writes(c, gradients, true);
  writes.value(out<4>(c.dk), {v, dout, q, 0, V});
  writes.key(out<4>(c.dv), k, q, dout, 0, V);

  const OutputTensor<4> w = room(DType::f32, c.batch, c.tokens, c.query_heads, c.M);
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
  exact_gates(c, written(w), in<4>(c.s), in<4>(c.dk), false, states, gradients);
}

}  // namespace

extern "C" void run(const Call* c) {
  const Card card(c->gated);
  if (c->by_head) {
    by_head(*c);
  } else {
    c->gated.exact ? by_exact_kernels(c->gated) : by_channel(c->gated);
  }
}
// Whether a card takes a head's keys that are so wide.
extern "C" int fits(int D, int shared) {
  emulated::shared_bytes = shared;
  bool fits = false;
  must(head_fits(D, fits));
  emulated::shared_bytes = emulated::kSharedBytes;
  return fits;
}
extern "C" void step(const Step* c) {
  GlaStep p{};
  p.sequences = c->sequences;
  p.heads = static_cast<int>(c->heads), p.query_heads = static_cast<int>(c->query_heads);
  p.key_share = static_cast<int>(c->key_share), p.query_share = static_cast<int>(c->query_share);
  p.D = static_cast<int>(c->D), p.V = static_cast<int>(c->V), p.scale = static_cast<float>(c->scale);
  p.q = in<3>(c->q), p.k = in<3>(c->k), p.v = in<3>(c->v), p.g = in<3>(c->g);
  p.state = out<4>(c->state), p.o = out<3>(c->o);
  must(gla_step(p, nullptr));
}

// What the files of gsa and gla have in common: a call's tensors, and the scans and the exact kernels on
// them. In the words of GsaShape: gla's key channels are M, and its D is 0.
#pragma once

#include "call.h"
#include "fp32/fp32.h"
#include "gsa/gsa.h"
#include "tile/segments.h"

namespace gated {

using namespace girih::kernels;

struct Gated {
  int64_t batch, tokens, sequences;
  const void* cu_seqlens;
  int64_t rows;  // cu_seqlens are of rows
  int64_t heads, query_heads, D, V, M, slots, feature;
  double scale;
  int64_t exact;   // by the kernels of exact
  int64_t shared;  // bytes that a block may have
  int64_t card;    // processors that sequences are cut for (tile/segments.h)
  Array q, k, v, s, g, dout;
  // Of two memories: the states and their gradients, [N, heads, width, M].
  Array initial[2], last[2], dlast[2], dinitial[2];
  Array o, dq, dk, dv, ds, dg;
};

// What a call runs on.
struct Card {
  explicit Card(const Gated& c) {
    emulated::shared_bytes = static_cast<int>(c.shared), kMultiprocessors = c.card,
    emulated::early_products = true;
  }
  ~Card() { emulated::shared_bytes = emulated::kSharedBytes, emulated::early_products = false; }
};

inline SequenceLayout tokens_of(const Gated& c) {
  return {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, c.rows != 0};
}

inline GsaShape shape_of(const Gated& c) {
  GsaShape shape{};
  shape.tokens = tokens_of(c);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V);
  shape.M = static_cast<int>(c.M), shape.slots = static_cast<int>(c.slots);
  shape.dtype = c.exact ? DType::f32 : static_cast<DType>(c.q.dtype);
  shape.feature = static_cast<Feature>(c.feature);
  shape.scale = static_cast<float>(c.scale);
  return shape;
}

// The states of all chunks, or their gradients.
inline void* states_of(const Gated& c, Rooms& room) {
  const int64_t numbers = token_range_count(tokens_of(c), kChunk) * c.heads * (c.D + c.V) * c.M;
  return room.bytes(numbers * (c.exact ? 4 : 2));
}

// What a memory gets: x_t s_t^T, in reverse read_t y_t^T.
struct Written {
  InputTensor<4> x, s;
};
inline void scan(const Gated& c, bool reverse, const Written (&memory)[2], const bool* is_factored,
                 void* states, Rooms& room) {
  GatedScan p{};
  p.tokens = tokens_of(c), p.heads = static_cast<int>(c.heads);
  p.group = static_cast<int>(reverse ? c.query_heads / c.heads : 1);
  p.M = static_cast<int>(c.M), p.dtype = shape_of(c).dtype, p.reverse = reverse;
  p.g = in<4>(c.g), p.is_factored = is_factored;
  for (int i = 0; i < 2; ++i) {
    const int width = static_cast<int>(i == 0 ? c.D : c.V);
    if (width == 0) continue;
    p.memory[i] = {memory[i].x, memory[i].s, in<4>(reverse ? c.dlast[i] : c.initial[i]),
                   out<4>(reverse ? c.dinitial[i] : c.last[i]), width};
  }
  p.states = states;
  p.workspace = room.bytes(gated_scan_workspace(p));
  must(gated_scan(p, nullptr));
}

// The reads of the exact kernels through the states before the chunks, or in reverse after them.
struct Reads {
  Fp32ReadShape shape;

  Reads(const Gated& c, const void* states, bool reverse) : shape{} {
    shape.tokens = tokens_of(c);
    shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
    shape.M = static_cast<int>(c.M), shape.reverse = reverse, shape.g = in<4>(c.g);
    shape.states = static_cast<const float*>(states), shape.rows = static_cast<int>(c.D + c.V);
  }
  using Term = ValueRead::Term;
  void value(const OutputTensor<4>& to, const Term& one, const Term& two = {}) const {
    must(fp32_value_read({shape, {one, two}, to}, nullptr));
  }
  void key(const OutputTensor<4>& to, const InputTensor<4>& p, const InputTensor<4>& s,
           const InputTensor<4>& y, int64_t first_row, int64_t width) const {
    must(fp32_key_read({shape, p, s, y, static_cast<int>(first_row), static_cast<int>(width), to}, nullptr));
  }
};

// dg of the exact kernels. s_of_g: s is 1 - e^g, and dg has what comes through it.
inline void exact_gates(const Gated& c, const InputTensor<4>& w, const InputTensor<4>& s,
                        const InputTensor<4>& ds, bool s_of_g, const void* states, const void* gradients) {
  Fp32GateGradient p{};
  p.tokens = tokens_of(c), p.heads = static_cast<int>(c.heads);
  p.query_heads = static_cast<int>(c.query_heads), p.M = static_cast<int>(c.M);
  p.w = w, p.s = s, p.ds = ds;
  if (s_of_g) p.g = in<4>(c.g);
  p.states = static_cast<const float*>(states), p.gradients = static_cast<const float*>(gradients);
  p.width[0] = static_cast<int>(c.D), p.width[1] = static_cast<int>(c.V);
  for (int i = 0; i < 2; ++i)
    p.final_state[i] = in<4>(c.last[i]), p.initial_gradient[i] = in<4>(c.dinitial[i]);
  p.dg = out<4>(c.dg);
  must(fp32_gate_gradient(p, nullptr));
}

// What the rows of queries leave for the rows of keys.
inline GateGradientTerms left_by_rows(const Gated& c, Rooms& room) {
  const int64_t chunks = token_range_count(tokens_of(c), kChunk);
  return {static_cast<bool*>(room.bytes(chunks * c.heads)),
          room(DType::f32, c.batch, c.tokens, c.query_heads, c.M)};
}

}  // namespace gated

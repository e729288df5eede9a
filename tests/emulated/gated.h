// Common to gsa.cpp and gla.cpp: the arguments of a call, the scans and the fp32 kernels. gla reuses GsaShape
// with M = key channels and D = 0.
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
  int64_t rows;  // cu_seqlens is [batch, 2]: begin and end of the sequence of every batch row
  int64_t heads, query_heads, D, V, M, slots, feature;
  double scale;
  int64_t use_fp32;    // run the fp32 kernels
  int64_t shared;      // maximum shared memory of a block, in bytes
  int64_t processors;  // multiprocessors; determines the number of segments (tile/segments.h)
  Array q, k, v, s, g, dout;
  // States and their gradients of the key memory and the value memory, [N, heads, width, M].
  Array initial[2], last[2], dlast[2], dinitial[2];
  Array o, dq, dk, dv, ds, dg;
};

// Sets the attributes of the emulated device for a call.
struct EmulatedDevice {
  explicit EmulatedDevice(const Gated& c) {
    emulated::shared_bytes = static_cast<int>(c.shared), kMultiprocessors = c.processors,
    emulated::has_early_products = true;
  }
  ~EmulatedDevice() { emulated::shared_bytes = emulated::kSharedBytes, emulated::has_early_products = false; }
};

inline SequenceLayout make_layout(const Gated& c) {
  return {c.batch, c.tokens, c.sequences, c.cu_seqlens, true, c.rows != 0};
}

inline GsaShape make_shape(const Gated& c) {
  GsaShape shape{};
  shape.tokens = make_layout(c);
  shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
  shape.D = static_cast<int>(c.D), shape.V = static_cast<int>(c.V);
  shape.M = static_cast<int>(c.M), shape.slots = static_cast<int>(c.slots);
  shape.dtype = c.use_fp32 ? DType::f32 : static_cast<DType>(c.q.dtype);
  shape.feature = static_cast<Feature>(c.feature);
  shape.scale = static_cast<float>(c.scale);
  return shape;
}

// Allocates the states before all chunks, or their gradients.
inline void* allocate_states(const Gated& c, Buffers& buffers) {
  const int64_t count = token_range_count(make_layout(c), kChunk) * c.heads * (c.D + c.V) * c.M;
  return buffers.bytes(count * (c.use_fp32 ? 4 : 2));
}

// The update x_t s_t^T of a memory at token t. In reverse, the update of the state gradient: (q, dz) for the
// key memory and (do, p) for the value memory.
struct MemoryUpdate {
  InputTensor<4> x, s;
};
inline void run_scan(const Gated& c, bool reverse, const MemoryUpdate (&memory)[2], const bool* is_factored,
                     void* states, Buffers& buffers) {
  GatedScan p{};
  p.tokens = make_layout(c), p.heads = static_cast<int>(c.heads);
  p.group = static_cast<int>(reverse ? c.query_heads / c.heads : 1);
  p.M = static_cast<int>(c.M), p.dtype = make_shape(c).dtype, p.reverse = reverse;
  p.g = as_input<4>(c.g), p.is_factored = is_factored;
  for (int i = 0; i < 2; ++i) {
    const int width = static_cast<int>(i == 0 ? c.D : c.V);
    if (width == 0) continue;
    p.memory[i] = {memory[i].x, memory[i].s, as_input<4>(reverse ? c.dlast[i] : c.initial[i]),
                   as_output<4>(reverse ? c.dinitial[i] : c.last[i]), width};
  }
  p.states = states;
  p.workspace = buffers.bytes(gated_scan_workspace(p));
  check_launch(gated_scan(p, nullptr));
}

// Reads of the fp32 kernels. They use the states before the chunks or, in reverse, the state gradients after
// the chunks.
struct Fp32Reads {
  Fp32ReadShape shape;

  Fp32Reads(const Gated& c, const void* states, bool reverse) : shape{} {
    shape.tokens = make_layout(c);
    shape.heads = static_cast<int>(c.heads), shape.query_heads = static_cast<int>(c.query_heads);
    shape.M = static_cast<int>(c.M), shape.reverse = reverse, shape.g = as_input<4>(c.g);
    shape.states = static_cast<const float*>(states), shape.rows = static_cast<int>(c.D + c.V);
  }
  using Term = ValueRead::Term;
  void read_values(const OutputTensor<4>& output, const Term& first, const Term& second = {}) const {
    check_launch(fp32_value_read({shape, {first, second}, output}, nullptr));
  }
  void read_keys(const OutputTensor<4>& output, const InputTensor<4>& p, const InputTensor<4>& s,
                 const InputTensor<4>& y, int64_t first_row, int64_t width) const {
    check_launch(fp32_key_read({shape, p, s, y, static_cast<int>(first_row), static_cast<int>(width), output},
                               nullptr));
  }
};

// dg of the fp32 kernels. is_s_tied: s = 1 - e^g, so dg includes ds * ds/dg.
inline void run_fp32_gate_gradient(const Gated& c, const InputTensor<4>& w, const InputTensor<4>& s,
                                   const InputTensor<4>& ds, bool is_s_tied, const void* states,
                                   const void* gradients) {
  Fp32GateGradient p{};
  p.tokens = make_layout(c), p.heads = static_cast<int>(c.heads);
  p.query_heads = static_cast<int>(c.query_heads), p.M = static_cast<int>(c.M);
  p.w = w, p.s = s, p.ds = ds;
  if (is_s_tied) p.g = as_input<4>(c.g);
  p.states = static_cast<const float*>(states), p.gradients = static_cast<const float*>(gradients);
  p.width[0] = static_cast<int>(c.D), p.width[1] = static_cast<int>(c.V);
  for (int i = 0; i < 2; ++i)
    p.final_state[i] = as_input<4>(c.last[i]), p.initial_gradient[i] = as_input<4>(c.dinitial[i]);
  p.dg = as_output<4>(c.dg);
  check_launch(fp32_gate_gradient(p, nullptr));
}

// Allocates the terms of the gate gradient that the dq kernel writes and the dkv kernel reads.
inline GateGradientTerms make_gate_terms(const Gated& c, Buffers& buffers) {
  const int64_t chunks = token_range_count(make_layout(c), kChunk);
  return {static_cast<bool*>(buffers.bytes(chunks * c.heads)),
          buffers.tensor(DType::f32, c.batch, c.tokens, c.query_heads, c.M)};
}

}  // namespace gated

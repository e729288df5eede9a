// Common to gsa.cpp and gla.cpp: the arguments of a call. gla reuses GsaShape with M = key channels and D =
// 0.
#pragma once

#include "call.h"
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

// Allocates the states before all chunks, which a call with backward saves.
inline void* allocate_states(const Gated& c, Buffers& buffers) {
  return buffers.bytes(token_range_count(make_layout(c), kChunk) * c.heads * (c.D + c.V) * c.M * 2);
}

// Runs a plan with a workspace of its own.
template <class Problem>
void run_plan(cudaError_t (*plan)(const Problem&, Workspace&, cudaStream_t), const Problem& problem) {
  Buffers workspace;
  check_launch(plan(problem, workspace, nullptr));
}

}  // namespace gated

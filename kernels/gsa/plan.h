// Common to the plans of gsa and gla: intermediate tensors and the arguments of a scan.
#pragma once

#include "gsa/kernels.h"

namespace girih::kernels {

// The states before all chunks, or their gradients: [chunks, H, D + V, M].
inline void* new_states(const GsaShape& shape, Workspace& workspace) {
  const int64_t rows = token_range_count(shape.tokens, kChunk) * shape.heads * (shape.D + shape.V);
  return workspace.bytes(rows * shape.M * dtype_size(shape.dtype));
}

// `state` [N, H, width, M], in the workspace if the caller does not ask for this result.
inline OutputTensor<4> state_or_new(const OutputTensor<4>& state, int width, const GsaShape& shape,
                                    Workspace& workspace) {
  if (state.data != nullptr) return state;
  return workspace.tensor(DType::f32, shape.tokens.sequences, shape.heads, width, shape.M);
}

// [B, T, HQ, M]
inline OutputTensor<4> new_query_rows(DType dtype, const GsaShape& shape, Workspace& workspace) {
  return workspace.tensor(dtype, shape.tokens.batch, shape.tokens.tokens, shape.query_heads, shape.M);
}

inline GateGradientTerms new_gate_terms(const GsaShape& shape, Workspace& workspace) {
  return {workspace.array<bool>(token_range_count(shape.tokens, kChunk) * shape.heads),
          new_query_rows(DType::f32, shape, workspace)};
}

// A scan without memories.
inline GatedScan make_scan(const GsaShape& shape, bool reverse, const InputTensor<4>& g, void* states) {
  GatedScan scan{};
  scan.tokens = shape.tokens;
  scan.heads = shape.heads;
  scan.group = reverse ? shape.query_heads / shape.heads : 1;
  scan.M = shape.M;
  scan.dtype = shape.dtype;
  scan.reverse = reverse;
  scan.g = g;
  scan.states = states;
  return scan;
}

}  // namespace girih::kernels

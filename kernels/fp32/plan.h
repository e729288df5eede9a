// Common to the plans of gsa and gla in fp32.
#pragma once

#include "fp32/fp32.h"
#include "gsa/plan.h"

namespace girih::kernels {

// Reads through the states before all chunks, or with `reverse` through the gradients of the states after all
// chunks.
inline Fp32ReadShape make_read_shape(const GsaShape& shape, bool reverse, const InputTensor<4>& g,
                                     const void* states) {
  return {shape.tokens,
          shape.heads,
          shape.query_heads,
          shape.M,
          reverse,
          g,
          static_cast<const float*>(states),
          shape.D + shape.V};
}

// The gradient of the gates, without the reads and the writes. `scan` is the forward scan and has the final
// states; `reverse` is the reversed scan.
inline Fp32GateGradient make_gate_gradient(const GsaShape& shape, const GatedScan& scan,
                                           const GatedScan& reverse) {
  Fp32GateGradient gradient{};
  gradient.tokens = shape.tokens;
  gradient.heads = shape.heads, gradient.query_heads = shape.query_heads, gradient.M = shape.M;
  gradient.states = static_cast<const float*>(scan.states);
  gradient.gradients = static_cast<const float*>(reverse.states);
  for (int i = 0; i < 2; ++i) {
    gradient.width[i] = scan.memory[i].width;
    gradient.final_state[i] = as_input(scan.memory[i].final);
    gradient.initial_gradient[i] = as_input(reverse.memory[i].final);
  }
  return gradient;
}

}  // namespace girih::kernels

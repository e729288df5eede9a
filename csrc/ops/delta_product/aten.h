// The ATen implementation of delta_product, for any device, dtype and size.
#pragma once

#include "problem.h"

namespace girih::delta_product {

// o, the final state (s, position), the saved tensors (states, prepared, transitions)
using Results = std::tuple<Tensor, Tensor, OptionalTensor, Tensor, Tensor, Tensor>;

// Gradients of q, k, v, beta, g, the state (s, position), cu_seqlens
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor>;

// The gradients of the outputs.
struct OutputGradients {
  static auto arguments(auto& g) { return std::tie(g.o, g.s, g.position); }
  OptionalTensor o, s, position;
};

struct SavedTensors {
  static auto arguments(auto& saved) { return std::tie(saved.states, saved.prepared, saved.transitions); }
  Tensor states, prepared, transitions;
};

Results forward(const Call& call, bool save);

}  // namespace girih::delta_product

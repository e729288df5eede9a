// The ATen implementation of lattice, for any device, dtype and size.
#pragma once

#include "problem.h"

namespace girih::lattice {

// o, the final state (first, step, decay, position), the saved tensors (memories, ends, last, last_step)
using Results = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The gradients of q, k, v, gamma, g, the state (first, step, decay, position), cu_seqlens
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor>;

// The gradients of the outputs.
struct OutputGradients {
  static auto arguments(auto& g) { return std::tie(g.o, g.first, g.step, g.decay, g.position); }
  OptionalTensor o, first, step, decay, position;
};

struct SavedTensors {
  static auto arguments(auto& saved) {
    return std::tie(saved.memories, saved.ends, saved.last, saved.last_step);
  }
  Tensor memories, ends, last, last_step;
};

Results forward(const Call& call, bool save);

}  // namespace girih::lattice

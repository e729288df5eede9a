// The ATen implementation of cat_attention, for any device, dtype and size.
#pragma once

#include "problem.h"

namespace girih::cat_attention {

// o, lse
using Results = std::tuple<Tensor, Tensor>;
// The gradients of q, k, v, cu_chunks
using Gradients = std::tuple<Tensor, Tensor, Tensor, OptionalTensor>;

struct OutputGradients {
  static auto arguments(auto& g) { return std::tie(g.o); }
  OptionalTensor o;
};

struct SavedTensors {
  static auto arguments(auto& saved) { return std::tie(saved.lse, saved.o); }
  Tensor lse, o;
};

Results forward(const Call& call, bool save);
// Always has a value, as the functions of register_backward return an optional.
std::optional<Gradients> backward(const Call& call, const OutputGradients& grads, const SavedTensors& saved);

}  // namespace girih::cat_attention

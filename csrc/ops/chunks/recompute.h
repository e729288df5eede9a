// Recomputes in backward to save memory.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace girih {

using Tensors = std::vector<at::Tensor>;

// f(inputs) under autograd. Saves the inputs only; backward runs f again. Undefined inputs are passed to f as
// undefined. All outputs are defined.
Tensors recompute(const std::function<Tensors(const Tensors&)>& f, const Tensors& inputs);

}  // namespace girih

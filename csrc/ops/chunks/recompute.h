// Time for memory under autograd.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace girih {

using Tensors = std::vector<at::Tensor>;

// f(inputs), differentiable, holding for backward no more than the inputs: backward runs f again. Undefined
// inputs are handed on as they are; every output is defined.
Tensors recompute(const std::function<Tensors(const Tensors&)>& f, const Tensors& inputs);

}  // namespace girih

// How the functions with gradients call the operators that have kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "fused.h"

namespace girih::fused {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The operator of this name, below autograd.
template <class Signature, class... Arguments>
auto run(const c10::TypedOperatorHandle<Signature>& op, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(arguments...);
}
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// [..., width] -> [rows, width]
inline Tensor in_rows(const Tensor& x) {
  return x.reshape({x.numel() / std::max<int64_t>(x.size(-1), 1), x.size(-1)});
}

// What follows may be differentiated once more: then gradients are made of PyTorch's operators.
inline bool once_more() { return at::GradMode::is_enabled(); }

}  // namespace girih::fused

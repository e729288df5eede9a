// Helpers of the autograd functions that call the CUDA operators.
#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>

#include "../registration/functions.h"
#include "fused.h"

namespace girih::fused {

using ops::find_typed_operator, ops::to_optional;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Calls the operator below autograd.
template <class Signature, class... Arguments>
auto call_below_autograd(const c10::TypedOperatorHandle<Signature>& op, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(arguments...);
}

// Whether backward runs with create_graph. Gradients are then computed by PyTorch's operators, which are
// differentiable.
inline bool is_double_backward() { return at::GradMode::is_enabled(); }

// [..., width] -> [rows, width]. Sizes may be symbolic; the code does not read their values.
inline Tensor flatten_rows(const Tensor& x) {
  c10::SymInt rows = 1;
  for (const auto& size : x.sym_sizes().slice(0, x.dim() - 1)) rows = rows * size;
  return x.reshape_symint({rows, x.sym_size(-1)});
}
// The sizes of x with another last size.
inline c10::SymDimVector with_last_size(const Tensor& x, int64_t width) {
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = width;
  return sizes;
}

// a b in `dtype`; a product of 16-bit matrices in fp32 is not rounded to 16 bits first.
inline Tensor matrix_product(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  const bool is_wide = a.is_cuda() && at::isReducedFloatingType(a.scalar_type()) && dtype == at::kFloat &&
                       !is_double_backward();
  return is_wide ? at::mm(a, b, dtype) : a.mm(b).to(dtype);
}

}  // namespace girih::fused

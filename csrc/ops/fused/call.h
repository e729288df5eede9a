// How the functions with gradients call the operators that have kernels.
#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>

#include "../registration/functions.h"
#include "fused.h"

namespace girih::fused {

using ops::find, ops::none_if_absent;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The operator, below autograd.
template <class Signature, class... Arguments>
auto run(const c10::TypedOperatorHandle<Signature>& op, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(arguments...);
}

// In backward: what follows may be differentiated once more. Then gradients are made of PyTorch's operators.
inline bool once_more() { return at::GradMode::is_enabled(); }

// Sizes may be a compiler's symbols: none of them is asked for its number.
//
// [..., width] -> [rows, width]
inline Tensor in_rows(const Tensor& x) {
  c10::SymInt rows = 1;
  for (const auto& size : x.sym_sizes().slice(0, x.dim() - 1)) rows = rows * size;
  return x.reshape_symint({rows, x.sym_size(-1)});
}
// x's sizes, the last one in another's place.
inline c10::SymDimVector sizes_of_width(const Tensor& x, int64_t width) {
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = width;
  return sizes;
}

// a b in this dtype; of 16 bits in fp32 without a rounding between.
inline Tensor matrix_product(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  const bool is_wide =
      a.is_cuda() && at::isReducedFloatingType(a.scalar_type()) && dtype == at::kFloat && !once_more();
  return is_wide ? at::mm(a, b, dtype) : a.mm(b).to(dtype);
}

}  // namespace girih::fused

// short_conv on meta tensors: shapes of the results, and the path without a device.
#include "../registration/dispatch.h"
#include "problem.h"

namespace girih::short_conv {
namespace {

using Activation = std::optional<std::string_view>;

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& state_x, const OptionalTensor& cu_seqlens,
                                   Activation activation, bool) {
  const auto p = Problem::check(x, weight, bias, state_x, cu_seqlens, activation);
  return {at::empty_symint({p.B, p.T, p.channels}, x.options()),
          at::empty_symint({p.N, p.W - 1, p.channels}, x.options())};
}

Explanation explain(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& state_x, const OptionalTensor& cu_seqlens, Activation activation,
                    std::string_view device, bool) {
  Problem::check(x, weight, bias, state_x, cu_seqlens, activation);
  return explained(Problem::path(x), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("short_conv_forward", &forward); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) { m.impl("short_conv_explain", &explain); }

}  // namespace girih::short_conv

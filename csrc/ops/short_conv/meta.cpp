#include "../dispatch.h"
#include "problem.h"

namespace girih::short_conv {
namespace {

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& state_x, const OptionalTensor& cu_seqlens,
                                   std::optional<std::string_view> activation, bool) {
  const auto p = Problem::check(x, weight, bias, state_x, cu_seqlens, activation);
  return {at::empty_symint({p.B, p.T, p.channels}, x.options()),
          at::empty_symint({p.N, p.W - 1, p.channels}, x.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("short_conv_forward", &forward); }

}  // namespace girih::short_conv

// gated_rms_norm on meta tensors: shapes of the results, and the path without a device.
#include "../registration/dispatch.h"
#include "problem.h"

namespace girih::gated_rms_norm {
namespace {

Tensor forward(const Tensor& x, const Tensor& weight, const OptionalTensor& gate, std::string_view activation,
               double eps, bool) {
  Problem::check(x, weight, gate, activation, eps);
  return at::empty_symint(x.sym_sizes(), x.options());
}

Explanation explain(const Tensor& x, const Tensor& weight, const OptionalTensor& gate,
                    std::string_view activation, double eps, std::string_view device, bool) {
  Problem::check(x, weight, gate, activation, eps);
  return explained(Problem::path(x), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("gated_rms_norm_forward", &forward); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) { m.impl("gated_rms_norm_explain", &explain); }

}  // namespace girih::gated_rms_norm

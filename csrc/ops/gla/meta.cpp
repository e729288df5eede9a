// gla on meta tensors: shapes of the results, and the path without a device.
#include "../registration/dispatch.h"
#include "problem.h"

namespace girih::gla {
namespace {

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const OptionalTensor& g, const OptionalTensor& state_s,
                                           const OptionalTensor& cu_seqlens, std::optional<double> scale,
                                           bool save) {
  const auto p = Problem::check(q, k, v, g, state_s, cu_seqlens, scale);
  return {at::empty_symint({p.B, p.T, p.output_heads(), p.V}, q.options()),
          at::empty_symint({p.N, p.H, p.D, p.V}, q.options().dtype(accumulate_type(q))),
          at::empty_symint(p.saved(q, g, cu_seqlens, save), q.options())};
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                    const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                    std::optional<double> scale, std::string_view device, bool step) {
  const auto p = Problem::check(q, k, v, g, state_s, cu_seqlens, scale);
  return explained(step ? Problem::step_path(q) : p.path(q, g), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("gla_forward", &forward); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) { m.impl("gla_explain", &explain); }

}  // namespace girih::gla

// gsa on meta tensors: shapes of the results, and the path without a device.
#include "../registration/dispatch.h"
#include "problem.h"

namespace girih::gsa {
namespace {

std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s, const OptionalTensor& g,
    const OptionalTensor& state_k, const OptionalTensor& state_v, const OptionalTensor& state_z,
    const OptionalTensor& cu_seqlens, std::optional<double> scale, std::string_view feature, bool save) {
  const auto p = Problem::check(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature);
  const auto options = q.options().dtype(accumulate_type(q));
  OptionalTensor z;
  if (!given(g)) z = at::empty_symint({p.N, p.H, p.M}, options);
  return {at::empty_symint({p.B, p.T, p.HQ, p.V}, q.options()),
          at::empty_symint({p.N, p.H, p.D, p.M}, options), at::empty_symint({p.N, p.H, p.M, p.V}, options), z,
          at::empty_symint(p.saved(q, g, cu_seqlens, save), q.options())};
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                    const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                    const OptionalTensor& state_z, const OptionalTensor& cu_seqlens,
                    std::optional<double> scale, std::string_view feature, std::string_view device,
                    bool step) {
  const auto p = Problem::check(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature);
  return explained(step ? Problem::step_path(q) : p.path(q, g), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("gsa_forward", &forward); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) { m.impl("gsa_explain", &explain); }

}  // namespace girih::gsa

// cat_attention on meta tensors: shapes of the results, and the path without a device.
#include "../registration/dispatch.h"
#include "problem.h"

namespace girih::cat_attention {
namespace {

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const OptionalTensor& cu_chunks, int64_t chunk,
                                   std::optional<double> scale, bool save) {
  const auto p = Problem::check(q, k, v, cu_chunks, chunk, scale);
  const auto options = q.options().dtype(accumulate_type(q));
  return {at::empty_symint({p.B, p.T, p.HQ, p.V}, q.options()),
          save ? at::empty_symint({p.B, p.T, p.HQ}, options) : at::empty({0}, options)};
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_chunks,
                    int64_t chunk, std::optional<double> scale, std::string_view device, bool) {
  return explained(Problem::check(q, k, v, cu_chunks, chunk, scale).path(q), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("cat_attention_forward", &forward); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) { m.impl("cat_attention_explain", &explain); }

}  // namespace girih::cat_attention

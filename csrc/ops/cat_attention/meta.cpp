#include "../dispatch.h"
#include "problem.h"

namespace girih::cat_attention {
namespace {

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const OptionalTensor& cu_chunks, int64_t chunk, std::optional<double>,
                                   bool save) {
  const auto p = Problem::check(q, k, v, cu_chunks, chunk);
  const auto options = q.options().dtype(accumulate_type(q));
  return {at::empty_symint({p.B, p.T, p.HQ, p.V}, q.options()),
          save ? at::empty_symint({p.B, p.T, p.HQ}, options) : at::empty({0}, options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("cat_attention_forward", &forward); }

}  // namespace girih::cat_attention

// delta_product on meta tensors: shapes of the results, and the path without a device.
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::delta_product {
namespace {

Results forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                     const OptionalTensor& g, const OptionalTensor& state_s,
                     const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                     std::optional<double> scale, bool l2norm_qk, std::optional<int64_t> chunk,
                     Between between_chunks, bool save) {
  const auto p = Problem::check(q, k, v, beta, g, state_s, state_position, cu_seqlens, n, scale, l2norm_qk,
                                chunk, between_chunks);
  const auto kept = p.saved(q, beta, g, cu_seqlens, n, l2norm_qk, chunk, between_chunks, save);
  OptionalTensor position;
  if (between_chunks) position = at::empty_symint({p.N}, q.options().dtype(at::kLong));
  return {at::empty_symint({p.B, p.T, p.output_heads(), p.V}, q.options()),
          at::empty_symint({p.N, p.H, p.D, p.V}, q.options().dtype(accumulate_type(q))),
          position,
          at::empty_symint(kept.states, q.options().dtype(kept.states_type)),
          at::empty_symint(kept.prepared, q.options().dtype(kept.prepared_type)),
          at::empty_symint(kept.transitions, q.options().dtype(at::kFloat))};
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                    const OptionalTensor& g, const OptionalTensor& state_s,
                    const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                    std::optional<double> scale, bool l2norm_qk, std::optional<int64_t> chunk,
                    Between between_chunks, std::string_view device, bool step) {
  const auto p = Problem::check(q, k, v, beta, g, state_s, state_position, cu_seqlens, n, scale, l2norm_qk,
                                chunk, between_chunks);
  return explained(
      step ? p.step_path(q, n, between_chunks) : p.path(q, beta, g, n, l2norm_qk, between_chunks), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("delta_product_forward", &forward_meta); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) { m.impl("delta_product_explain", &explain); }

}  // namespace girih::delta_product

// trellis on meta tensors: shapes of the results, and the path without a device.
#include "../registration/dispatch.h"
#include "problem.h"

namespace girih::trellis {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
    const OptionalTensor& g, const OptionalTensor& state_first_k, const OptionalTensor& state_k,
    const OptionalTensor& state_first_v, const OptionalTensor& state_v, const OptionalTensor& state_position,
    const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi, std::string_view f, bool save) {
  const auto p = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                state_position, cu_seqlens, chunk, phi, f);
  const auto options = q.options().dtype(accumulate_type(q));
  const auto kept = p.saved(q, state_position, cu_seqlens, chunk, save);
  const auto memory = [&](const c10::SymInt& width) {
    return at::empty_symint({p.N, p.H, p.M, width}, options);
  };
  return {at::empty_symint({p.B, p.T, p.HQ, p.V}, q.options()),
          memory(p.D),
          memory(p.D),
          memory(p.V),
          memory(p.V),
          at::empty_symint({p.N}, q.options().dtype(at::kLong)),
          at::empty_symint(kept.memories[0], q.options().dtype(kept.type)),
          at::empty_symint(kept.memories[1], q.options().dtype(kept.type)),
          at::empty_symint(kept.tokens, q.options().dtype(kept.type)),
          at::empty_symint(kept.tokens, q.options().dtype(kept.type)),
          at::empty_symint(kept.fit, options)};
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                    const OptionalTensor& g, const OptionalTensor& state_first_k,
                    const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                    const OptionalTensor& state_v, const OptionalTensor& state_position,
                    const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi, std::string_view f,
                    std::string_view device, bool step) {
  const auto p = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                state_position, cu_seqlens, chunk, phi, f);
  return explained(step ? Problem::step_path(q) : p.path(q), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("trellis_forward", &forward); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) { m.impl("trellis_explain", &explain); }

}  // namespace girih::trellis

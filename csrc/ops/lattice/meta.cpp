// lattice on meta tensors: shapes of the results, and the path without a device.
#include "../registration/dispatch.h"
#include "problem.h"

namespace girih::lattice {
namespace {

std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma, const OptionalTensor& g,
    const OptionalTensor& state_first, const OptionalTensor& state_step, const OptionalTensor& state_decay,
    const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
    std::string_view objective, bool normalize, double shrinkage, bool save) {
  const auto p = Problem::check(q, k, v, gamma, g, state_first, state_step, state_decay, state_position,
                                cu_seqlens, chunk, objective, normalize, shrinkage);
  const auto options = q.options().dtype(accumulate_type(q));
  const auto kept = p.saved(q, state_position, cu_seqlens, chunk, normalize, shrinkage, save);
  OptionalTensor decay;
  if (given(g)) decay = at::empty_symint({p.N, p.H}, options);
  return {at::empty_symint({p.B, p.T, p.HQ, p.D}, q.options()),
          at::empty_symint({p.N, p.H, p.D, p.M}, options),
          at::empty_symint({p.N, p.H, p.D, p.M}, options),
          decay,
          at::empty_symint({p.N}, q.options().dtype(at::kLong)),
          at::empty_symint(kept.memories, q.options().dtype(kept.memories_type)),
          at::empty_symint(kept.ends, options),
          at::empty_symint(kept.last, options),
          at::empty_symint(kept.last, options)};
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                    const OptionalTensor& g, const OptionalTensor& state_first,
                    const OptionalTensor& state_step, const OptionalTensor& state_decay,
                    const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                    std::string_view objective, bool normalize, double shrinkage, std::string_view device,
                    bool step) {
  const auto p = Problem::check(q, k, v, gamma, g, state_first, state_step, state_decay, state_position,
                                cu_seqlens, chunk, objective, normalize, shrinkage);
  return explained(
      step ? Problem::step_path(q, normalize, shrinkage) : p.path(q, chunk, normalize, shrinkage), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { m.impl("lattice_forward", &forward); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) { m.impl("lattice_explain", &explain); }

}  // namespace girih::lattice

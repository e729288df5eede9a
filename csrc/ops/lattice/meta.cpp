// lattice on meta tensors: shapes of the results, and the path without a device.
#include "aten.h"

namespace girih::lattice {
namespace {

Results forward_meta(const Call& call, bool save) {
  const auto p = Problem::check(call);
  const auto options = call.q.options(), state_options = options.dtype(accumulate_type(call.q));
  const auto shapes = p.saved(call, save);
  OptionalTensor decay;
  if (is_defined(call.g)) decay = at::empty_symint({p.N, p.H}, state_options);
  return {at::empty_symint({p.B, p.T, p.HQ, p.D}, options),
          at::empty_symint({p.N, p.H, p.D, p.M}, state_options),
          at::empty_symint({p.N, p.H, p.D, p.M}, state_options),
          decay,
          at::empty_symint({p.N}, options.dtype(at::kLong)),
          at::empty_symint(shapes.memories, options.dtype(shapes.memories_type)),
          at::empty_symint(shapes.ends, state_options),
          at::empty_symint(shapes.last, state_options),
          at::empty_symint(shapes.last, state_options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { register_forward<&forward_meta>(m); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  register_explain<Call, Problem, &Problem::path>(m);
}

}  // namespace girih::lattice

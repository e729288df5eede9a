// cat_attention on meta tensors: shapes of the results, and the path without a device.
#include "aten.h"

namespace girih::cat_attention {
namespace {

Results forward_meta(const Call& call, bool save) {
  const auto p = Problem::check(call);
  const auto options = call.q.options(), lse_options = options.dtype(accumulate_type(call.q));
  return {at::empty_symint({p.B, p.T, p.HQ, p.V}, options),
          save ? at::empty_symint({p.B, p.T, p.HQ}, lse_options) : at::empty({0}, lse_options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { register_forward<&forward_meta>(m); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  register_explain<Call, Problem, &Problem::path>(m);
}

}  // namespace girih::cat_attention

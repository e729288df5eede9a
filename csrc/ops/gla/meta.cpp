// gla on meta tensors: shapes of the results, and the path without a device.
#include "aten.h"

namespace girih::gla {
namespace {

Results forward_meta(const Call& call, bool save) {
  const auto p = Problem::check(call);
  const auto options = call.q.options();
  return {at::empty_symint({p.B, p.T, p.output_heads(), p.V}, options),
          at::empty_symint({p.N, p.H, p.D, p.V}, options.dtype(accumulate_type(call.q))),
          at::empty_symint(p.saved(call, save), options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { register_forward<&forward_meta>(m); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  register_explain<Call, Problem, &Problem::path>(m);
}

}  // namespace girih::gla

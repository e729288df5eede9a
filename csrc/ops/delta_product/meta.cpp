// delta_product on meta tensors, which computes the shapes of the results, and delta_product_explain without
// the limits of a device.
#include "aten.h"

namespace girih::delta_product {
namespace {

Results forward_meta(const Call& call, bool save) {
  const auto p = Problem::check(call);
  const auto options = call.q.options();
  const auto saved_shapes = p.saved(call, save);
  OptionalTensor position;
  if (call.between_chunks) position = at::empty_symint({p.N}, options.dtype(at::kLong));
  return {at::empty_symint({p.B, p.T, p.output_heads(), p.V}, options),
          at::empty_symint({p.N, p.H, p.D, p.V}, options.dtype(accumulate_type(call.q))),
          position,
          at::empty_symint(saved_shapes.states, options.dtype(saved_shapes.states_type)),
          at::empty_symint(saved_shapes.prepared, options.dtype(saved_shapes.prepared_type)),
          at::empty_symint(saved_shapes.transitions, options.dtype(at::kFloat))};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { register_forward<&forward_meta>(m); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  register_explain<Call, Problem, &Problem::path>(m);
}

}  // namespace girih::delta_product

// ttt on meta tensors: shapes of the results, and the path without a device.
#include "aten.h"

namespace girih::ttt {
namespace {

Results forward_meta(const Call& call, bool save) {
  return ttt::to_results(trellis::run_meta(Problem::check(call), call, save));
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { register_forward<&forward_meta>(m); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  register_explain<Call, Problem, &Problem::path>(m);
}

}  // namespace girih::ttt

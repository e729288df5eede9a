// The ATen implementation of ttt: that of trellis with one memory.
#include "aten.h"

namespace girih::ttt {

Results forward(const Call& call, bool save) {
  return ttt::to_results(trellis::run_aten(Problem::check(call), call, save));
}

GIRIH_IMPL_ATEN(m) { register_forward<&WithoutTF32<&forward>::call>(m); }

}  // namespace girih::ttt

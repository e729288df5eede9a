// trellis on meta tensors: shapes of the results, and the path without a device.
#include "aten.h"

namespace girih::trellis {

Outputs run_meta(const Problem& problem, const Call& call, bool save) {
  const auto& p = problem;
  const auto options = call.q.options(), state_options = options.dtype(accumulate_type(call.q));
  const auto shapes = p.saved(call, save);
  const auto saved_options = options.dtype(shapes.type);
  Outputs out;
  out.o = at::empty_symint({p.B, p.T, p.HQ, p.memory_count == 2 ? p.V : p.M}, options);
  out.position = at::empty_symint({p.N}, options.dtype(at::kLong));
  for (int m = 0; m < p.memory_count; ++m) {
    const c10::SymInt width = m == 0 ? p.D : p.V;
    out.chunk_start[m] = at::empty_symint({p.N, p.H, p.M, width}, state_options);
    out.memory[m] = at::empty_symint({p.N, p.H, p.M, width}, state_options);
    out.saved.chunk_memories[m] = at::empty_symint(shapes.chunk_memories[m], saved_options);
  }
  out.saved.z = at::empty_symint(shapes.token_rows, saved_options);
  out.saved.u = at::empty_symint(shapes.token_rows, saved_options);
  out.saved.map_stats = at::empty_symint(shapes.map_stats, state_options);
  return out;
}

namespace {

Results forward_meta(const Call& call, bool save) {
  return to_results(run_meta(Problem::check(call), call, save));
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Meta, m) { register_forward<&forward_meta>(m); }
TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  register_explain<Call, Problem, &Problem::path>(m);
}

}  // namespace girih::trellis

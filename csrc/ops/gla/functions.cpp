// girih::ops::gla and girih::ops::gla_step.
#include "../registration/functions.h"

#include "problem.h"

namespace girih::ops {

GLAState GLAState::start(int64_t batch, int64_t heads, int64_t D, int64_t V,
                         const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, V}, options)};
}

std::pair<Tensor, GLAState> gla(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                const GLAOptions& options) {
  using Result = std::tuple<Tensor, Tensor>;
  static const auto op = find_typed_operator<Signature<gla::Call, Result>>("girih::gla");
  auto [o, s] = op.call(q, k, v, to_optional(g), to_optional(options.state.s),
                        to_optional(options.cu_seqlens), options.scale);
  return {o, {s}};
}

Tensor gla_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const GLAOptions& options) {
  static const auto op = find_typed_operator<StepSignature<gla::Call>>("girih::gla_step");
  check_step_state("gla", options.state.s, options.cu_seqlens);
  return op.call(q, k, v, to_optional(g), options.state.s, options.scale);
}

}  // namespace girih::ops

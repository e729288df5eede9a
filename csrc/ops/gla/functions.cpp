// girih::ops::gla and girih::ops::gla_step.
#include "../registration/functions.h"

namespace girih::ops {

GLAState GLAState::start(int64_t batch, int64_t heads, int64_t D, int64_t V,
                         const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, V}, options)};
}

std::pair<Tensor, GLAState> gla(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                const GLAOptions& options) {
  using Signature = std::tuple<Tensor, Tensor>(TensorArg, TensorArg, TensorArg, OptionalTensorArg,
                                               OptionalTensorArg, OptionalTensorArg, OptionalFloatArg);
  static const auto op = find_operator<Signature>("girih::gla");
  auto [o, s] = op.call(q, k, v, to_optional(g), to_optional(options.state.s),
                        to_optional(options.cu_seqlens), options.scale);
  return {o, {s}};
}

Tensor gla_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const GLAOptions& options) {
  using Signature = Tensor(TensorArg, TensorArg, TensorArg, OptionalTensorArg, TensorArg, OptionalFloatArg);
  static const auto op = find_operator<Signature>("girih::gla_step");
  check_step_state("gla", options.state.s, options.cu_seqlens);
  return op.call(q, k, v, to_optional(g), options.state.s, options.scale);
}

}  // namespace girih::ops

// girih::ops::gla and girih::ops::gla_step.
#include "../registration/functions.h"

namespace girih::ops {

GLAState GLAState::start(int64_t batch, int64_t heads, int64_t D, int64_t V,
                         const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, V}, options)};
}

std::pair<Tensor, GLAState> gla(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                const GLAOptions& options) {
  using Signature = std::tuple<Tensor, Tensor>(Required, Required, Required, Maybe, Maybe, Maybe, Number);
  static const auto op = find<Signature>("girih::gla");
  auto [o, s] = op.call(q, k, v, none_if_absent(g), none_if_absent(options.state.s),
                        none_if_absent(options.cu_seqlens), options.scale);
  return {o, {s}};
}

Tensor gla_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const GLAOptions& options) {
  using Signature = Tensor(Required, Required, Required, Maybe, Required, Number);
  static const auto op = find<Signature>("girih::gla_step");
  refuse_start("gla", options.state.s, options.cu_seqlens);
  return op.call(q, k, v, none_if_absent(g), options.state.s, options.scale);
}

}  // namespace girih::ops

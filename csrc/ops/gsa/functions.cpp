// girih::ops::gsa and girih::ops::gsa_step.
#include "../registration/functions.h"

namespace girih::ops {

GSAState GSAState::start(int64_t batch, int64_t heads, int64_t D, int64_t V, int64_t M, bool abc,
                         const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, M}, options), at::zeros({batch, heads, M, V}, options),
          abc ? at::full({batch, heads, M}, -INFINITY, options) : Tensor()};
}

std::pair<Tensor, GSAState> gsa(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s,
                                const Tensor& g, const GSAOptions& options) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, OptionalTensor>(
      Required, Required, Required, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Number, Word);
  static const auto op = find<Signature>("girih::gsa");
  const auto& past = options.state;
  auto [o, state_k, state_v, state_z] =
      op.call(q, k, v, none_if_absent(s), none_if_absent(g), none_if_absent(past.k), none_if_absent(past.v),
              none_if_absent(past.z), none_if_absent(options.cu_seqlens), options.scale, options.feature);
  return {o, {state_k, state_v, state_z.value_or(Tensor())}};
}

Tensor gsa_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s, const Tensor& g,
                const GSAOptions& options) {
  using Signature =
      Tensor(Required, Required, Required, Maybe, Maybe, Required, Required, Maybe, Number, Word);
  static const auto op = find<Signature>("girih::gsa_step");
  const auto& state = options.state;
  refuse_start("gsa", state.k, options.cu_seqlens);
  return op.call(q, k, v, none_if_absent(s), none_if_absent(g), state.k, state.v, none_if_absent(state.z),
                 options.scale, options.feature);
}

}  // namespace girih::ops

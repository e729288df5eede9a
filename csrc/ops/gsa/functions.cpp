// girih::ops::gsa and girih::ops::gsa_step.
#include "../registration/functions.h"

#include "problem.h"

namespace girih::ops {

GSAState GSAState::start(int64_t batch, int64_t heads, int64_t D, int64_t V, int64_t M, bool abc,
                         const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, M}, options), at::zeros({batch, heads, M, V}, options),
          abc ? at::full({batch, heads, M}, -INFINITY, options) : Tensor()};
}

std::pair<Tensor, GSAState> gsa(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s,
                                const Tensor& g, const GSAOptions& options) {
  using Result = std::tuple<Tensor, Tensor, Tensor, OptionalTensor>;
  static const auto op = find_typed_operator<Signature<gsa::Call, Result>>("girih::gsa");
  const auto& past = options.state;
  auto [o, state_k, state_v, state_z] =
      op.call(q, k, v, to_optional(s), to_optional(g), to_optional(past.k), to_optional(past.v),
              to_optional(past.z), to_optional(options.cu_seqlens), options.scale, options.feature);
  return {o, {state_k, state_v, state_z.value_or(Tensor())}};
}

Tensor gsa_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s, const Tensor& g,
                const GSAOptions& options) {
  static const auto op = find_typed_operator<StepSignature<gsa::Call>>("girih::gsa_step");
  const auto& state = options.state;
  check_step_state("gsa", state.k, options.cu_seqlens);
  return op.call(q, k, v, to_optional(s), to_optional(g), state.k, state.v, to_optional(state.z),
                 options.scale, options.feature);
}

}  // namespace girih::ops

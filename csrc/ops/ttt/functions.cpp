// girih::ops::ttt and girih::ops::ttt_step.
#include "../registration/functions.h"

#include "problem.h"

namespace girih::ops {

TTTState TTTState::start(int64_t batch, const Tensor& k) {
  return {clone_to_batch(k, batch), clone_to_batch(k, batch),
          at::zeros({batch}, k.options().dtype(at::kLong))};
}

std::pair<Tensor, TTTState> ttt(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                                const Tensor& g, const TTTOptions& options) {
  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  static const auto op = find_typed_operator<Signature<ttt::Call, Result>>("girih::ttt");
  const auto& past = options.state;
  auto [o, first_k, memory, position] =
      op.call(q, k, a, gamma, to_optional(g), to_optional(options.phi_weight), to_optional(past.first_k),
              expand_to_sequences(past.k, q, options.cu_seqlens), to_optional(past.position),
              to_optional(options.cu_seqlens), options.chunk, options.phi, options.f);
  return {o, {first_k, memory, position}};
}

Tensor ttt_step(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma, const Tensor& g,
                const TTTOptions& options) {
  static const auto op = find_typed_operator<StepSignature<ttt::Call>>("girih::ttt_step");
  const auto& state = options.state;
  check_step_state("ttt", state.position, options.cu_seqlens);
  return op.call(q, k, a, gamma, to_optional(g), to_optional(options.phi_weight), state.first_k, state.k,
                 state.position, options.chunk, options.phi, options.f);
}

}  // namespace girih::ops

// girih::ops::trellis and girih::ops::trellis_step.
#include "../registration/functions.h"

#include "problem.h"

namespace girih::ops {

TrellisState TrellisState::start(int64_t batch, const Tensor& k, const Tensor& v) {
  return {clone_to_batch(k, batch), clone_to_batch(k, batch), clone_to_batch(v, batch),
          clone_to_batch(v, batch), at::zeros({batch}, k.options().dtype(at::kLong))};
}

std::pair<Tensor, TrellisState> trellis(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                                        const Tensor& gamma, const Tensor& g, const TrellisOptions& options) {
  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static const auto op = find_typed_operator<Signature<trellis::Call, Result>>("girih::trellis");
  const auto& past = options.state;
  auto [o, first_k, memory_k, first_v, memory_v, position] =
      op.call(q, k, v, a, gamma, to_optional(g), to_optional(past.first_k),
              expand_to_sequences(past.k, q, options.cu_seqlens), to_optional(past.first_v),
              expand_to_sequences(past.v, q, options.cu_seqlens), to_optional(past.position),
              to_optional(options.cu_seqlens), options.chunk, options.phi, options.f);
  return {o, {first_k, memory_k, first_v, memory_v, position}};
}

Tensor trellis_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                    const Tensor& g, const TrellisOptions& options) {
  static const auto op = find_typed_operator<StepSignature<trellis::Call>>("girih::trellis_step");
  const auto& state = options.state;
  check_step_state("trellis", state.position, options.cu_seqlens);
  return op.call(q, k, v, a, gamma, to_optional(g), state.first_k, state.k, state.first_v, state.v,
                 state.position, options.chunk, options.phi, options.f);
}

}  // namespace girih::ops

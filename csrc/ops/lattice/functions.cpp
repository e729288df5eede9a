// girih::ops::lattice and girih::ops::lattice_step.
#include "../registration/functions.h"

#include "problem.h"

namespace girih::ops {

LatticeState LatticeState::start(int64_t batch, const Tensor& first, bool gated) {
  const auto memory = clone_to_batch(first, batch);
  return {memory, at::zeros_like(memory),
          gated ? at::zeros({batch, memory.size(1)}, memory.options()) : Tensor(),
          at::zeros({batch}, memory.options().dtype(at::kLong))};
}

std::pair<Tensor, LatticeState> lattice(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& gamma, const Tensor& g, const LatticeOptions& options) {
  using Result = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor>;
  static const auto op = find_typed_operator<Signature<lattice::Call, Result>>("girih::lattice");
  const auto& past = options.state;
  auto [o, first, step, decay, position] =
      op.call(q, k, v, gamma, to_optional(g), expand_to_sequences(past.first, q, options.cu_seqlens),
              to_optional(past.step), to_optional(past.decay), to_optional(past.position),
              to_optional(options.cu_seqlens), options.chunk, options.objective, options.normalize,
              options.shrinkage);
  return {o, {first, step, decay.value_or(Tensor()), position}};
}

Tensor lattice_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma, const Tensor& g,
                    const LatticeOptions& options) {
  static const auto op = find_typed_operator<StepSignature<lattice::Call>>("girih::lattice_step");
  const auto& state = options.state;
  check_step_state("lattice", state.position, options.cu_seqlens);
  return op.call(q, k, v, gamma, to_optional(g), state.first, state.step, to_optional(state.decay),
                 state.position, options.chunk, options.objective, options.normalize, options.shrinkage);
}

}  // namespace girih::ops

// girih::ops::lattice and girih::ops::lattice_step.
#include "../registration/functions.h"

namespace girih::ops {

LatticeState LatticeState::start(int64_t batch, const Tensor& first, bool gated) {
  const auto memory = own(first, batch);
  return {memory, at::zeros_like(memory),
          gated ? at::zeros({batch, memory.size(1)}, memory.options()) : Tensor(),
          at::zeros({batch}, memory.options().dtype(at::kLong))};
}

std::pair<Tensor, LatticeState> lattice(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& gamma, const Tensor& g, const LatticeOptions& options) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor>(
      Required, Required, Required, Required, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, int64_t, Word, bool,
      double);
  static const auto op = find<Signature>("girih::lattice");
  const auto& past = options.state;
  auto [o, first, step, decay, position] =
      op.call(q, k, v, gamma, none_if_absent(g), for_each_sequence(past.first, q, options.cu_seqlens),
              none_if_absent(past.step), none_if_absent(past.decay), none_if_absent(past.position),
              none_if_absent(options.cu_seqlens), options.chunk, options.objective, options.normalize,
              options.shrinkage);
  return {o, {first, step, decay.value_or(Tensor()), position}};
}

Tensor lattice_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma, const Tensor& g,
                    const LatticeOptions& options) {
  using Signature = Tensor(Required, Required, Required, Required, Maybe, Required, Required, Maybe, Required,
                           int64_t, Word, bool, double);
  static const auto op = find<Signature>("girih::lattice_step");
  const auto& state = options.state;
  refuse_start("lattice", state.position, options.cu_seqlens);
  return op.call(q, k, v, gamma, none_if_absent(g), state.first, state.step, none_if_absent(state.decay),
                 state.position, options.chunk, options.objective, options.normalize, options.shrinkage);
}

}  // namespace girih::ops

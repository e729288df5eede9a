// girih::ops::ttt and girih::ops::ttt_step.
#include "../registration/functions.h"

namespace girih::ops {

TTTState TTTState::start(int64_t batch, const Tensor& k) {
  return {own(k, batch), own(k, batch), at::zeros({batch}, k.options().dtype(at::kLong))};
}

std::pair<Tensor, TTTState> ttt(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                                const Tensor& g, const TTTOptions& options) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor>(
      Required, Required, Required, Required, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, int64_t, Word, Word);
  static const auto op = find<Signature>("girih::ttt");
  const auto& past = options.state;
  auto [o, first_k, memory, position] = op.call(
      q, k, a, gamma, none_if_absent(g), none_if_absent(options.phi_weight), none_if_absent(past.first_k),
      for_each_sequence(past.k, q, options.cu_seqlens), none_if_absent(past.position),
      none_if_absent(options.cu_seqlens), options.chunk, options.phi, options.f);
  return {o, {first_k, memory, position}};
}

Tensor ttt_step(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma, const Tensor& g,
                const TTTOptions& options) {
  using Signature = Tensor(Required, Required, Required, Required, Maybe, Maybe, Required, Required, Required,
                           int64_t, Word, Word);
  static const auto op = find<Signature>("girih::ttt_step");
  const auto& state = options.state;
  refuse_start("ttt", state.position, options.cu_seqlens);
  return op.call(q, k, a, gamma, none_if_absent(g), none_if_absent(options.phi_weight), state.first_k,
                 state.k, state.position, options.chunk, options.phi, options.f);
}

}  // namespace girih::ops

// girih::ops::trellis and girih::ops::trellis_step.
#include "../registration/functions.h"

namespace girih::ops {

TrellisState TrellisState::start(int64_t batch, const Tensor& k, const Tensor& v) {
  return {own(k, batch), own(k, batch), own(v, batch), own(v, batch),
          at::zeros({batch}, k.options().dtype(at::kLong))};
}

std::pair<Tensor, TrellisState> trellis(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                                        const Tensor& gamma, const Tensor& g, const TrellisOptions& options) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
      Required, Required, Required, Required, Required, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe,
      int64_t, Word, Word);
  static const auto op = find<Signature>("girih::trellis");
  const auto& past = options.state;
  auto [o, first_k, memory_k, first_v, memory_v, position] =
      op.call(q, k, v, a, gamma, none_if_absent(g), none_if_absent(past.first_k),
              for_each_sequence(past.k, q, options.cu_seqlens), none_if_absent(past.first_v),
              for_each_sequence(past.v, q, options.cu_seqlens), none_if_absent(past.position),
              none_if_absent(options.cu_seqlens), options.chunk, options.phi, options.f);
  return {o, {first_k, memory_k, first_v, memory_v, position}};
}

Tensor trellis_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                    const Tensor& g, const TrellisOptions& options) {
  using Signature = Tensor(Required, Required, Required, Required, Required, Maybe, Required, Required,
                           Required, Required, Required, int64_t, Word, Word);
  static const auto op = find<Signature>("girih::trellis_step");
  const auto& state = options.state;
  refuse_start("trellis", state.position, options.cu_seqlens);
  return op.call(q, k, v, a, gamma, none_if_absent(g), state.first_k, state.k, state.first_v, state.v,
                 state.position, options.chunk, options.phi, options.f);
}

}  // namespace girih::ops

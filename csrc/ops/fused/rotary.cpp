// Rotary embedding with gradients.
#include <torch/library.h>

#include "call.h"

namespace girih::fused {
namespace {

using RotarySignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, int64_t, const Tensor&,
                                                           const Tensor&);
using RotaryBackwardSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                       const Tensor&);

// Rotates the pairs of dx back, by PyTorch.
Tensor rotate_back(const Tensor& dx, const Tensor& position, const Tensor& rate) {
  const auto angle = position.unsqueeze(-1) * rate;
  const auto cos = angle.cos().to(dx.scalar_type()).unsqueeze(-2),
             sin = angle.sin().to(dx.scalar_type()).unsqueeze(-2);
  const auto pair = dx.chunk(2, -1);
  return at::cat({pair[0] * cos + pair[1] * sin, pair[1] * cos - pair[0] * sin}, -1);
}

// Saves only the positions and the rates.
struct Rotary : Function<Rotary> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, int64_t query_heads,
                               const Tensor& position, const Tensor& rate) {
    static const auto op = find_typed_operator<RotarySignature>("girih::rotary");
    ctx->save_for_backward({position, rate});
    const auto [q, k, v] = call_below_autograd(op, x, query_heads, position, rate);
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_typed_operator<RotaryBackwardSignature>("girih::rotary_backward");
    const auto saved = ctx->get_saved_variables();
    const auto &dq = grads[0], &dk = grads[1], &dv = grads[2], &position = saved[0], &rate = saved[1];
    if (!is_double_backward()) return {op.call(dq, dk, dv, position, rate), {}, {}, {}};
    return {at::cat({rotate_back(dq, position, rate), rotate_back(dk, position, rate), dv}, 2), {}, {}, {}};
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor> rotary(const Tensor& x, int64_t query_heads, const Tensor& position,
                                          const Tensor& rate) {
  auto outputs = Rotary::apply(x, query_heads, position, rate);
  return {std::move(outputs[0]), std::move(outputs[1]), std::move(outputs[2])};
}

TORCH_LIBRARY_IMPL(girih, Autograd, m) { m.impl("rotary", &rotary); }

}  // namespace girih::fused

// Gate activations with gradients.
#include <torch/library.h>

#include "call.h"

namespace girih::fused {
namespace {

using ForwardSignature = Tensor(const Tensor&, std::string_view, const OptionalTensor&, const OptionalTensor&,
                                double);
using BackwardSignature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view,
                                                     const OptionalTensor&, const OptionalTensor&, double,
                                                     bool);

// The gradients of r, bias and rate, by PyTorch.
variable_list gate_gradients(const Tensor& dy, const Tensor& r, const Tensor& bias, const Tensor& rate,
                             std::string_view gate, double scale) {
  const auto z = bias.defined() ? r.to(at::kFloat) + bias : r.to(at::kFloat);
  auto dz = dy;
  Tensor drate;
  if (gate == "decay") {
    const auto factor = -rate.exp();
    drate = (dy * factor * at::softplus(z)).sum_to_size(rate.sizes());
    dz = dy * factor * z.sigmoid();
  } else if (gate != "linear") {
    const auto s = z.sigmoid();
    dz = dy * scale * (gate == "sigmoid" ? s * (1 - s) : 1 - s);
  }
  return {dz.to(r.scalar_type()), dz.sum_to_size(r.sizes().slice(r.dim() - 1)), drate};
}

struct RowGates : Function<RowGates> {
  static Tensor forward(AutogradContext* ctx, const Tensor& r, std::string_view gate,
                        const OptionalTensor& bias, const OptionalTensor& rate, double scale) {
    static const auto op = find_typed_operator<ForwardSignature>("girih::row_gates");
    ctx->save_for_backward({r, bias.value_or(Tensor()), rate.value_or(Tensor())});
    ctx->saved_data["gate"] = std::string(gate);
    ctx->saved_data["scale"] = scale;
    return call_below_autograd(op, r, gate, bias, rate, scale);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_typed_operator<BackwardSignature>("girih::row_gates_backward");
    const auto saved = ctx->get_saved_variables();
    const auto &dy = grads[0], &r = saved[0], &bias = saved[1], &rate = saved[2];
    const auto gate = ctx->saved_data["gate"].toStringView();
    const double scale = ctx->saved_data["scale"].toDouble();
    // Edges exist for tensor inputs only: the index of rate depends on bias.
    const bool needs_dbias = bias.defined() && ctx->needs_input_grad(1);
    const bool needs_drate = rate.defined() && ctx->needs_input_grad(bias.defined() ? 2 : 1);
    variable_list gradients(3);
    if (is_double_backward()) {
      gradients = gate_gradients(dy, r, bias, rate, gate, scale);
    } else {
      const bool needs_sums = needs_dbias || needs_drate;
      const auto [dr, sums] = op.call(dy, r, gate, to_optional(bias), to_optional(rate), scale, needs_sums);
      gradients[0] = dr;
      if (needs_sums) gradients[1] = sums.select(0, 0), gradients[2] = sums.select(0, 1);
    }
    return {
        gradients[0], {}, needs_dbias ? gradients[1] : Tensor(), needs_drate ? gradients[2] : Tensor(), {}};
  }
};

}  // namespace

Tensor row_gates(const Tensor& r, std::string_view gate, const OptionalTensor& bias,
                 const OptionalTensor& rate, double scale) {
  return RowGates::apply(r, gate, bias, rate, scale);
}

TORCH_LIBRARY_IMPL(girih, Autograd, m) { m.impl("row_gates", &row_gates); }

}  // namespace girih::fused

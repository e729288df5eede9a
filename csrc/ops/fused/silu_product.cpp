// silu(gate) * up, and its product with a weight, with gradients.
#include <torch/library.h>

#include "call.h"

namespace girih::fused {
namespace {

using BackwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                             bool);

bool has_kernel(const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(
      up.sizes() == gate.sizes() && up.scalar_type() == gate.scalar_type() && up.device() == gate.device(),
      "girih: silu_product: up is ", up.scalar_type(), " ", up.sizes(), " on ", up.device(), "; expected ",
      gate.scalar_type(), " ", gate.sizes(), " on ", gate.device(), ", as gate");
  const auto dtype = gate.scalar_type();
  return gate.is_cuda() && (dtype == at::kFloat || at::isReducedFloatingType(dtype)) &&
         gate.numel() % kPack == 0;
}

Tensor compute_with_aten(const Tensor& gate, const Tensor& up) { return at::silu(gate) * up; }

Tensor compute_product(const Tensor& gate, const Tensor& up) {
  if (!has_kernel(gate, up)) return compute_with_aten(gate, up);
  static const auto op =
      find_typed_operator<Tensor(const Tensor&, const Tensor&)>("girih::silu_product_forward");
  return call_below_autograd(op, gate, up);
}

// The gradients of gate and up, and the product itself if `needs_product`.
std::tuple<Tensor, Tensor, Tensor> compute_gradients(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                                     bool needs_product) {
  if (!is_double_backward() && has_kernel(gate, up)) {
    static const auto op = find_typed_operator<BackwardSignature>("girih::silu_product_backward");
    return op.call(dy, gate, up, needs_product);
  }
  const auto product = needs_product ? compute_with_aten(gate, up) : Tensor();
  if (!is_double_backward()) return {at::silu_backward(dy * up, gate), at::silu(gate) * dy, product};
  const auto s = gate.sigmoid();
  return {dy * up * s * (1 + gate * (1 - s)), dy * gate * s, product};
}

struct SiluProduct : Function<SiluProduct> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    ctx->save_for_backward({gate, up});
    return compute_product(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [dgate, dup, none] = compute_gradients(grads[0], saved[0], saved[1], false);
    return {dgate, dup};
  }
};

struct SiluProductLinear : Function<SiluProductLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up, const Tensor& weight) {
    ctx->save_for_backward({gate, up, weight});
    return at::linear(compute_product(gate, up), weight);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &dy = grads[0], &gate = saved[0], &up = saved[1], &weight = saved[2];
    const bool needs_dweight = ctx->needs_input_grad(2);
    const auto dz = at::linear(dy, weight.to(dy.scalar_type()).t()).to(gate.scalar_type());
    const auto [dgate, dup, z] = compute_gradients(dz, gate, up, needs_dweight);
    Tensor dweight;
    if (needs_dweight)
      dweight =
          matrix_product(flatten_rows(dy).t(), flatten_rows(z.to(dy.scalar_type())), weight.scalar_type());
    return {dgate, dup, dweight};
  }
};

}  // namespace

Tensor silu_product(const Tensor& gate, const Tensor& up) { return SiluProduct::apply(gate, up); }

Tensor silu_product_linear(const Tensor& gate, const Tensor& up, const Tensor& weight) {
  return SiluProductLinear::apply(gate, up, weight);
}

TORCH_LIBRARY_FRAGMENT(girih, m) {
  m.def("silu_product(Tensor gate, Tensor up) -> Tensor", &silu_product);
  m.def("silu_product_linear(Tensor gate, Tensor up, Tensor weight) -> Tensor", &silu_product_linear);
}

}  // namespace girih::fused

// Gated RMS norm over the last dimension:
//   r = (mean(x^2) + eps)^-1/2        n = r x        y = n weight act(gate)
// Nothing is saved: backward reads x anyway, and computes r again from it.
//   u = dy act(gate)        dx = r (u weight - n mean(u weight n))
//   dweight = sum of u n    dgate = dy n weight act'(gate)
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::gated_rms_norm {
namespace {

Tensor normalise(const Tensor& x, double eps) {
  const auto wide = x.to(accumulate_type(x));
  return wide * wide.square().mean(-1, true).add_(eps).rsqrt_();
}

Tensor activate(const Tensor& gate, std::string_view activation) {
  return activation == "silu" ? at::silu(gate) : activation == "gelu" ? at::gelu(gate) : gate.sigmoid();
}

// The gradient of the gate from dact, the gradient of act(gate).
Tensor activation_backward(const Tensor& dact, const Tensor& gate, std::string_view activation) {
  return activation == "silu"   ? at::silu_backward(dact, gate)
         : activation == "gelu" ? at::gelu_backward(dact, gate)
                                : at::sigmoid_backward(dact, gate.sigmoid());
}

}  // namespace

Tensor forward(const Tensor& x, const Tensor& weight, const OptionalTensor& gate, std::string_view activation,
               double eps, bool) {
  Problem::check(x, weight, gate, activation, eps);
  const auto type = accumulate_type(x);
  auto y = normalise(x, eps).mul_(weight.to(type));
  if (is_defined(gate)) y.mul_(activate(gate->to(type), activation));
  return y.to(x.scalar_type()).contiguous();
}

Gradients backward(const OptionalTensor& grad_y, const Tensor& x, const Tensor& weight,
                   const OptionalTensor& gate, std::string_view activation, double eps) {
  Problem::check(x, weight, gate, activation, eps);
  const auto zeros = [](const Tensor& x) { return at::zeros(x.sizes(), x.options()); };
  if (!is_defined(grad_y)) {
    return {zeros(x), zeros(weight), is_defined(gate) ? OptionalTensor(zeros(*gate)) : std::nullopt};
  }
  const auto type = accumulate_type(x);
  const auto to_dtype_of = [](const Tensor& tensor, const Tensor& x) {
    return tensor.to(x.scalar_type()).contiguous();
  };
  const auto w = weight.to(type), dy = grad_y->to(type), wide = x.to(type);
  const auto r = wide.square().mean(-1, true).add_(eps).rsqrt_(), n = wide * r;
  OptionalTensor dgate;
  auto u = dy;
  if (is_defined(gate)) {
    const auto g = gate->to(type);
    dgate = to_dtype_of(activation_backward(n * w * dy, g, activation), *gate);
    u = activate(g, activation).mul_(dy);
  }
  const auto dn = u * w;
  const auto dx = (dn - n * (dn * n).mean(-1, true)).mul_(r);
  return {to_dtype_of(dx, x), to_dtype_of((u * n).reshape({-1, weight.size(0)}).sum(0), weight), dgate};
}

GIRIH_IMPL_ATEN(m) {
  m.impl("gated_rms_norm_forward", &forward);
  m.impl("gated_rms_norm_backward", &backward);
}

}  // namespace girih::gated_rms_norm

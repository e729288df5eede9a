// The maps phi, and u = J_phi(z)^T (phi(z) - a), by PyTorch. With y = silu(z) or z, phi = P y / r, where P
// centres for layer norm and is the identity otherwise, and r is the norm of P y (layer norm: its root mean
// square). Softmax is computed apart.
#include "phi.h"

namespace girih::trellis {

constexpr double kEps = 1e-6;

Phi::Phi(std::string_view name)
    : silu_(name == "silu" || name == "l2_silu" || name == "ln_silu"),
      norm_(name.starts_with("l2")                           ? Norm::l2
            : name == "layer_norm" || name.starts_with("ln") ? Norm::layer
            : name == "softmax"                              ? Norm::softmax
                                                             : Norm::none) {}

Tensor Phi::operator()(const Tensor& z) const {
  if (norm_ == Norm::softmax) return z.softmax(-1);
  const auto y = silu_ ? at::silu(z) : z;
  if (norm_ == Norm::none) return y;
  const auto c = centre(y);
  return c * (reduce(c.square()) + kEps).rsqrt();
}

Tensor Phi::project_target(const Tensor& a) const { return centre(a); }

std::pair<Tensor, Tensor> Phi::apply_silu(const Tensor& z) const {
  if (!silu_) return {z, Tensor()};
  // silu' = s (1 + z (1 - s)) = s + y (1 - s)
  const auto s = z.sigmoid(), y = z * s;
  return {y, at::addcmul(s, y, 1 - s)};
}

Tensor Phi::residual(const Tensor& z, const Tensor& Pa) const {
  if (norm_ == Norm::softmax) {
    // J^T w = p * (w - p.w)
    const auto p = z.softmax(-1);
    const auto pw = p * (p - Pa);
    return pw - p * pw.sum(-1, true);
  }
  const auto [y, slope] = apply_silu(z);
  Tensor u;
  if (norm_ == Norm::none) {
    u = y - Pa;
  } else {
    // J^T w = (P w - phi (phi.w) / N) / r. P phi = phi and P is symmetric, so w is replaced by P w = phi - P
    // a in both terms.
    const auto c = centre(y);
    const auto inverse_r = (reduce(c.square()) + kEps).rsqrt();
    const auto phi = c * inverse_r;
    const auto w = phi - Pa;
    u = at::addcmul(w, phi, reduce(phi * w), -1) * inverse_r;
  }
  return silu_ ? u * slope : u;
}

Tensor Phi::residual(const Tensor& z, const Tensor& a, const Tensor& w) const {
  if (norm_ == Norm::softmax) {
    const auto p = z.softmax(-1), px = p * (w * (w * p - a));
    return px - p * px.sum(-1, true);
  }
  const auto [y, slope] = apply_silu(z);
  Tensor u;
  if (norm_ == Norm::none) {
    u = w * (w * y - a);
  } else {
    // J^T x = (P x - phi (phi.x) / N) / r with x = w * (w * phi - a)
    const auto c = centre(y);
    const auto inverse_r = (reduce(c.square()) + kEps).rsqrt();
    const auto phi = c * inverse_r;
    const auto x = w * (w * phi - a);
    u = at::addcmul(centre(x), phi, reduce(phi * x), -1) * inverse_r;
  }
  return silu_ ? u * slope : u;
}

}  // namespace girih::trellis

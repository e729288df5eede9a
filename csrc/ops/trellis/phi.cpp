// The maps phi, and u = J_phi(z)^T (phi(z) - a), by PyTorch.
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
  const auto c = centred(y);
  return c * (total(c.square()) + kEps).rsqrt();
}

Tensor Phi::target(const Tensor& a) const { return centred(a); }

std::pair<Tensor, Tensor> Phi::activated(const Tensor& z) const {
  if (!silu_) return {z, Tensor()};
  // silu' = s (1 + z (1 - s)) = s + y (1 - s)
  const auto s = z.sigmoid(), y = z * s;
  return {y, at::addcmul(s, y, 1 - s)};
}

Tensor Phi::residual(const Tensor& z, const Tensor& target) const {
  if (norm_ == Norm::softmax) {
    // J^T w = p * (w - p.w)
    const auto p = z.softmax(-1);
    const auto pw = p * (p - target);
    return pw - p * pw.sum(-1, true);
  }
  const auto [y, slope] = activated(z);
  Tensor u;
  if (norm_ == Norm::none) {
    u = y - target;
  } else {
    // J^T w = (P w - phi (phi.w) / N) / r. P phi = phi and P is symmetric, so w is replaced by P w = phi - P
    // a in both terms.
    const auto c = centred(y);
    const auto inverse_r = (total(c.square()) + kEps).rsqrt();
    const auto phi = c * inverse_r;
    const auto w = phi - target;
    u = at::addcmul(w, phi, total(phi * w), -1) * inverse_r;
  }
  return silu_ ? u * slope : u;
}

Tensor Phi::residual(const Tensor& z, const Tensor& a, const Tensor& w) const {
  if (norm_ == Norm::softmax) {
    const auto p = z.softmax(-1), px = p * (w * (w * p - a));
    return px - p * px.sum(-1, true);
  }
  const auto [y, slope] = activated(z);
  Tensor u;
  if (norm_ == Norm::none) {
    u = w * (w * y - a);
  } else {
    // J^T x = (P x - phi (phi.x) / N) / r with x = w * (w * phi - a)
    const auto c = centred(y);
    const auto inverse_r = (total(c.square()) + kEps).rsqrt();
    const auto phi = c * inverse_r;
    const auto x = w * (w * phi - a);
    u = at::addcmul(centred(x), phi, total(phi * x), -1) * inverse_r;
  }
  return silu_ ? u * slope : u;
}

}  // namespace girih::trellis

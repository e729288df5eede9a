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

Tensor Phi::residual(const Tensor& z, const Tensor& target) const {
  if (norm_ == Norm::softmax) {
    // J^T w = p * (w - p.w)
    const auto p = z.softmax(-1);
    const auto pw = p * (p - target);
    return pw - p * pw.sum(-1, true);
  }
  Tensor y = z, slope;
  if (silu_) {
    // silu' = s (1 + z (1 - s)) = s + y (1 - s)
    const auto s = z.sigmoid();
    y = z * s;
    slope = at::addcmul(s, y, 1 - s);
  }
  Tensor u;
  if (norm_ == Norm::none) {
    u = y - target;
  } else {
    // J^T w = (P w - phi (phi.w) / N) / r. P phi = phi and P is symmetric, so P w = phi - P a stands for w in
    // both.
    const auto c = centred(y);
    const auto inverse_r = (total(c.square()) + kEps).rsqrt();
    const auto phi = c * inverse_r;
    const auto w = phi - target;
    u = at::addcmul(w, phi, total(phi * w), -1) * inverse_r;
  }
  return silu_ ? u * slope : u;
}

}  // namespace girih::trellis

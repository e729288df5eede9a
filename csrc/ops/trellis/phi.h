// The maps of Trellis over the last dimension M: phi(z) and u = J_phi(z)^T (phi(z) - a).
#pragma once

#include <ATen/ATen.h>

#include <string_view>

namespace girih::trellis {

using at::Tensor;

class Phi {
 public:
  explicit Phi(std::string_view name);

  Tensor operator()(const Tensor& z) const;

  // The part of the targets a on which `residual` depends, P a with P of the norm: layer norm centres them.
  // Computed once for all tokens.
  Tensor project_target(const Tensor& a) const;
  // J_phi(z)^T (phi(z) - a) from Pa = project_target(a)
  Tensor residual(const Tensor& z, const Tensor& Pa) const;
  // J_phi(z)^T (w * (w * phi(z) - a)), the gradient of |w * phi(z) - a|^2 / 2; a is not projected
  Tensor residual(const Tensor& z, const Tensor& a, const Tensor& w) const;

 private:
  enum class Norm { none, l2, layer, softmax };
  // y = silu(z) and its derivative; y = z and an undefined derivative without silu
  std::pair<Tensor, Tensor> apply_silu(const Tensor& z) const;
  Tensor centre(const Tensor& y) const { return norm_ == Norm::layer ? y - y.mean(-1, true) : y; }
  // The sum for l2norm, the mean for layer norm
  Tensor reduce(const Tensor& y) const { return norm_ == Norm::layer ? y.mean(-1, true) : y.sum(-1, true); }

  bool silu_;
  Norm norm_;
};

}  // namespace girih::trellis

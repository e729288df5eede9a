// The maps of Trellis: phi(z) and u = J_phi(z)^T (phi(z) - a), over the last dimension
// M.
#pragma once

#include <ATen/ATen.h>

#include <string_view>

namespace girih::trellis {

using at::Tensor;

class Phi {
 public:
  explicit Phi(std::string_view name);

  Tensor operator()(const Tensor& z) const;

  // What of the targets a `residual` depends on: layer norm sees them centred. Once for all tokens.
  Tensor target(const Tensor& a) const;
  // J_phi(z)^T (phi(z) - a), given target(a)
  Tensor residual(const Tensor& z, const Tensor& target) const;
  // J_phi(z)^T (w * (w * phi(z) - a)), the gradient of |w * phi(z) - a|^2 / 2, given a itself
  Tensor residual(const Tensor& z, const Tensor& a, const Tensor& w) const;

 private:
  enum class Norm { none, l2, layer, softmax };
  // y and its slope in z, undefined for 1
  std::pair<Tensor, Tensor> activated(const Tensor& z) const;
  Tensor centred(const Tensor& y) const { return norm_ == Norm::layer ? y - y.mean(-1, true) : y; }
  // sum for l2, mean for the layer norm: its N is M
  Tensor total(const Tensor& y) const { return norm_ == Norm::layer ? y.mean(-1, true) : y.sum(-1, true); }

  bool silu_;
  Norm norm_;
};

}  // namespace girih::trellis

// What layers compute beside their mixers: by the functions of ops/fused where these take the tensors, plain
// dense ones on a GPU, else by PyTorch's. python/girih/nn/functional has the same in fused.py, linears.py,
// gates.py and rotary.py, and what a compiler is given.
#pragma once

#include <array>

#include "layer.h"

namespace girih::nn {

// What autocast has products of x in, or `other`.
at::ScalarType autocast_dtype(const Tensor& x, at::ScalarType other);

// s = x + branch, or x, and its norm over the last dimension. Under autocast the kernel's result is rounded
// to autocast's dtype, as the product behind it would do.
std::pair<Tensor, Tensor> residual_norm(const Tensor& x, const Tensor& branch, const Tensor& weight,
                                        double eps);
inline Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return residual_norm(x, {}, weight, eps).second;
}
Tensor silu_rms_norm(const Tensor& x, const Tensor& weight, double eps);

// x / |x|, x [..., dim]; a row of zeros stays one.
Tensor unit_rows(const Tensor& x);

// q, k and v of qkv [B, T, sum of heads, D], q and k by `rotary`.
std::array<Tensor, 3> turned(const Tensor& qkv, at::IntArrayRef heads, const Tensor& position, double theta);

// silu(gate) * up
Tensor silu_product(const Tensor& gate, const Tensor& up);

// What each product makes of x; in training on a GPU together.
std::vector<Tensor> together(const Tensor& x, const std::vector<Product>& wanted);

// silu(gate) * up through one product without a gate or a bias.
Tensor silu_product_linear(const Tensor& gate, const Tensor& up, const Product& product);

}  // namespace girih::nn

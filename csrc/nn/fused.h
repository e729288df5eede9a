// Norms, linear layers, gates, SwiGLU and rotary positions: computed by the fused functions of ops/fused for
// contiguous tensors on a GPU, else by PyTorch. The Python twins are fused.py, linears.py, gates.py and
// rotary.py of python/girih/nn/functional.
#pragma once

#include <array>

#include "layer.h"

namespace girih::nn {

// The dtype in which autocast computes products of x; `other` without autocast.
at::ScalarType autocast_dtype(const Tensor& x, at::ScalarType other);

// s = x + branch (x if branch is undefined), and the RMS norm of s over the last dimension. Under autocast
// the kernel rounds the norm to the dtype of the product that follows.
std::pair<Tensor, Tensor> residual_norm(const Tensor& x, const Tensor& branch, const Tensor& weight,
                                        double eps);
inline Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return residual_norm(x, {}, weight, eps).second;
}
Tensor silu_rms_norm(const Tensor& x, const Tensor& weight, double eps);

// x / |x| over the last dimension; a zero row stays zero.
Tensor unit_rows(const Tensor& x);

// qkv [B, T, sum of heads, D] -> q and k rotated by `rotary`, and v.
std::array<Tensor, 3> split_and_rotate(const Tensor& qkv, at::IntArrayRef heads, const Tensor& position,
                                       double theta);

// silu(gate) * up
Tensor silu_product(const Tensor& gate, const Tensor& up);

// The gate of a product r = x W^T, without the product.
Tensor apply_gate(const Tensor& r, const Product& product);

// Computes every product of x; in training on a GPU by one operator, fused::linears.
std::vector<Tensor> apply_linears(const Tensor& x, const std::vector<Product>& specs);

// Applies a product to silu(gate) * up.
Tensor silu_product_linear(const Tensor& gate, const Tensor& up, const Product& product);

}  // namespace girih::nn

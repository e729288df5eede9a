// Functions with gradients for the parts of a layer other than its mixer: one pass over memory instead of
// several passes of PyTorch. They are not public operators. The layers in C++ call them here, the layers in
// Python as torch.ops.girih.*; a layer calls them only for the dtypes and devices that the kernels support,
// except where a function runs on any device. Second derivatives are computed by PyTorch.
#pragma once

#include "../arguments/check.h"
#include "../chunks/checkpoint.h"

namespace girih::fused {

constexpr int64_t kPack = 8;  // elements of a vector access of the kernels

// s = x + branch, or s = x without a branch. y [..., dim] = RMS norm of s in the dtype `rows`; without a
// weight the rows of y have length 1. x has the dtype `rows` or is an fp32 sum.
std::tuple<Tensor, Tensor> residual_norm(const Tensor& x, const OptionalTensor& branch,
                                         const OptionalTensor& weight, double eps, at::ScalarType rows);
// RMSNorm(silu(x)). Saves x only.
Tensor silu_norm(const Tensor& x, const Tensor& weight, double eps);

// silu(gate) * up; gate and up have the same shape and dtype. Saves its arguments; backward computes
// silu(gate) again. Runs on any device.
Tensor silu_product(const Tensor& gate, const Tensor& up);
// (silu(gate) * up) W^T. The backward kernel of gate and up also computes the product again. Runs on any
// device.
Tensor silu_product_linear(const Tensor& gate, const Tensor& up, const Tensor& weight);

// Gate activations of a product r [..., features], in fp32; bias and rate [features].
//   linear      r + bias
//   sigmoid     scale sigmoid(r + bias)
//   logsigmoid  scale log sigmoid(r + bias)
//   decay       -exp(rate) softplus(r + bias)
Tensor row_gates(const Tensor& r, std::string_view gate, const OptionalTensor& bias,
                 const OptionalTensor& rate, double scale);

// Splits x [B, T, heads of q, k and v, D] into q, k and v, and rotates the pairs (i, i + D/2) of q and k by
// position * rate_i.
std::tuple<Tensor, Tensor, Tensor> rotary(const Tensor& x, int64_t query_heads, const Tensor& position,
                                          const Tensor& rate);

// x W^T for every weight [out, in], in the dtype of x. dx is accumulated by the products, where autograd
// would add the terms one by one. One kernel makes the 16-bit copies of fp32 weights, which are saved for
// backward. The products of weight gradients have fp32 outputs. Weights with few rows form one product, whose
// parts are views: do not write them in place. Runs on any device. torch.compile traces through it, and then
// copies and sums are separate passes.
Tensors linears(const Tensor& x, at::TensorList weights);

// The sum of the cross entropies of labels [N] and logits x W^T, x [N, in], weight [classes, in]; labels
// equal to `ignored` do not count. At most `logits` logits exist at a time. Forward computes the gradients
// too and saves nothing else; a second derivative raises an error. Runs on any device. For C++ models; Python
// models use python/girih/nn/functional/loss.py, the same function for torch.compile.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& labels, int64_t ignored,
                            int64_t logits);

}  // namespace girih::fused

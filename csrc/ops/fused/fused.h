// What layers compute beside their mixers, with gradients: one pass over memory where PyTorch takes several.
// Not operators for users, who have PyTorch's. The layers of both languages call these, here and as
// torch.ops.girih.*, and decide where: the kernels take tensors of a few types on a GPU. Derivatives of
// gradients are PyTorch's.
#pragma once

#include "../arguments/check.h"
#include "../chunks/recompute.h"

namespace girih::fused {

constexpr int64_t kPack = 8;  // of the kernels: elements

// s = x + branch, or x, and y [..., dim], the RMS norm of s in the dtype `rows`; without a weight its rows
// are of length 1. x is rows or the fp32 sums of them.
std::tuple<Tensor, Tensor> residual_norm(const Tensor& x, const OptionalTensor& branch,
                                         const OptionalTensor& weight, double eps, at::ScalarType rows);
// norm(silu(x)), which keeps x alone.
Tensor silu_norm(const Tensor& x, const Tensor& weight, double eps);

// silu(gate) * up of one shape and dtype, which keeps its arguments alone: silu(gate) is made again. On any
// device.
Tensor silu_product(const Tensor& gate, const Tensor& up);
// The same times W^T; the product is made again in the pass that makes the gradients of gate and up. On any
// device.
Tensor silu_product_linear(const Tensor& gate, const Tensor& up, const Tensor& weight);

// Gates of a product r [..., features], in fp32; bias and rate [features].
//     linear r + bias, sigmoid scale sigmoid(r + bias), logsigmoid scale log sigmoid(r + bias),
//     decay -exp(rate) softplus(r + bias)
Tensor row_gates(const Tensor& r, std::string_view gate, const OptionalTensor& bias,
                 const OptionalTensor& rate, double scale);

// q, k and v of x [B, T, heads of all, D], q and k with their pairs (i, i + D/2) turned by position * rate_i.
std::tuple<Tensor, Tensor, Tensor> rotary(const Tensor& x, int64_t query_heads, const Tensor& position,
                                          const Tensor& rate);

// x W^T of every weight [out, in], in x's dtype. dx is one sum that the products make, where autograd adds
// one after the other; 16-bit copies of fp32 weights are made by one kernel and kept until backward, and
// gradients of weights leave their products in fp32. Narrow products are columns of one, which nobody may
// write in place. On any device; a compiler takes it apart, and makes copies and the sum of dx in passes of
// its own.
Tensors linears(const Tensor& x, at::TensorList weights);

// The sum of cross entropies of labels [N], of which those that are `ignored` do not count, and logits x W^T,
// x [N, in], weight [classes, in], of which `logits` are there at once. Their gradients are made with it:
// then they are all that is kept, and to ask for gradients of them is an error. On any device. C++ models
// have it; Python's have python/girih/nn/functional/loss.py, the same function as torch.compile takes it.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& labels, int64_t ignored,
                            int64_t logits);

}  // namespace girih::fused

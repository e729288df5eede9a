// Linear products of a layer. For up to 16 rows without gradient, as in decoding, one kernel (skinny GEMM,
// the operator girih::few_rows) computes several products of one input, with the prologue before them (a norm
// or an activation) and the gates after them. Beside the operators of the mixers, a step computes nothing
// else.
#pragma once

#include "layer.h"

namespace girih::nn {

// Applies `prologue` to x [..., width], then computes every product of the result. residual is added to the
// result of a single product without gate. If `has_skinny_gemm`, this is one launch, which rounds only the
// final results; else the functions of fused.h.
std::vector<Tensor> products(const Tensor& x, const std::vector<Product>& specs,
                             const RowInput& prologue = {}, const Tensor& residual = {});

// Whether the few_rows kernel supports the call: CUDA build, fp16 or bf16 on a GPU, 1 to 16 rows, no
// gradient, no autocast, contiguous tensors of one dtype.
bool has_skinny_gemm(const Tensor& x, const std::vector<Product>& specs, const RowInput& prologue = {},
                     const Tensor& residual = {});

// Whether x has the size of a decoding step: at most 16 rows, and no gradient is recorded. Then blocks pass
// the norm and the residual to `products`, which fuses them if `has_skinny_gemm`.
bool is_decode_sized(const Tensor& x);

// Applies `prologue` to x.
Tensor apply_prologue(const Tensor& x, const RowInput& prologue);

// The product of a linear layer, with its bias.
inline Product make_product(const torch::nn::Linear& proj, const std::string& gate = "none",
                            double scale = 1.0) {
  return {proj->weight, gate, proj->bias, {}, scale};
}

}  // namespace girih::nn

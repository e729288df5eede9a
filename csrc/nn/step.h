// Products of a few rows, all that a decoding step computes beside its mixers' own steps.
#pragma once

#include "layer.h"

namespace girih::nn {

// Each product of what `given` makes of x [..., width]; residual is added to that of a single one without a
// gate. One launch where `has_kernel`, of whose sums nothing is rounded before the end; else by fused.h.
std::vector<Tensor> products(const Tensor& x, const std::vector<Product>& wanted, const RowInput& given = {},
                             const Tensor& residual = {});

// A GPU, kernels, 16 bits, up to 16 rows, no gradient, no autocast, and tensors as they were made: dense, of
// one dtype.
bool has_kernel(const Tensor& x, const std::vector<Product>& wanted, const RowInput& given = {},
                const Tensor& residual = {});

// Rows as few as those of decoding, without gradients: products take what stands beside them along, where
// `has_kernel`.
bool are_few(const Tensor& x);

// What `given` makes of x.
Tensor made_of(const Tensor& x, const RowInput& given);

// What a linear layer computes.
inline Product product_of(const torch::nn::Linear& proj, const std::string& gate = "none",
                          double scale = 1.0) {
  return {proj->weight, gate, proj->bias, {}, scale};
}

}  // namespace girih::nn

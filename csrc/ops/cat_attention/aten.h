// The ATen implementation of cat_attention, for any device, dtype and size.
#pragma once

#include "../arguments/check.h"

namespace girih::cat_attention {

// o, lse
std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const OptionalTensor& cu_chunks, int64_t chunk,
                                   std::optional<double> scale, bool save);

// gradients of q, k, v, cu_chunks
using Gradients = std::tuple<Tensor, Tensor, Tensor, OptionalTensor>;

Gradients backward(const OptionalTensor& grad_o, const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptionalTensor& cu_chunks, const Tensor& lse, const Tensor& o, int64_t chunk,
                   std::optional<double> scale);

}  // namespace girih::cat_attention

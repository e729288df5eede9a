// The ATen implementation of gated_rms_norm, for any device, dtype and width.
#pragma once

#include "../arguments/check.h"

namespace girih::gated_rms_norm {

// gradients of x, weight, gate
using Gradients = std::tuple<Tensor, Tensor, OptionalTensor>;

Tensor forward(const Tensor& x, const Tensor& weight, const OptionalTensor& gate, std::string_view activation,
               double eps, bool save);

Gradients backward(const OptionalTensor& grad_y, const Tensor& x, const Tensor& weight,
                   const OptionalTensor& gate, std::string_view activation, double eps);

}  // namespace girih::gated_rms_norm

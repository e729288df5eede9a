// The ATen implementation of short_conv, for any device and dtype.
#pragma once

#include "../arguments/check.h"

namespace girih::short_conv {

// y, the final state
using Results = std::tuple<Tensor, Tensor>;
// gradients of x, weight, bias, state_x, cu_seqlens
using Gradients = std::tuple<Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor>;

Results forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const OptionalTensor& state_x, const OptionalTensor& cu_seqlens,
                std::optional<std::string_view> activation, bool save);

Gradients backward(const OptionalTensor& grad_y, const OptionalTensor& grad_state_x, const Tensor& x,
                   const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& state_x,
                   const OptionalTensor& cu_seqlens, std::optional<std::string_view> activation);

}  // namespace girih::short_conv

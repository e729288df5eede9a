#pragma once

#include "../check.h"

namespace girih::short_conv {

// short_conv_forward for any device and dtype -> y, the final state
std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& state_x, const OptionalTensor& cu_seqlens,
                                   std::optional<std::string_view> activation, bool save);

}  // namespace girih::short_conv

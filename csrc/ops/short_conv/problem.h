// The sizes and the path of short_conv.
#pragma once

#include "../arguments/path.h"

namespace girih::short_conv {

struct Problem {
  c10::SymInt B, T, channels, W, N;

  static Problem check(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& state_x, const OptionalTensor& cu_seqlens,
                       std::optional<std::string_view> activation) {
    static const auto& op = get_operator("short_conv");
    const auto sizes = girih::check(op, {x, weight, bias, state_x, cu_seqlens, activation});
    return {sizes["B"], sizes["T"], sizes["channels"], sizes["W"], sizes["N"]};
  }

  static Path path(const Tensor& x) {
    return x.scalar_type() == at::kDouble ? aten(kNoFloat64Kernels) : fp32(kMemoryBound);
  }
};

}  // namespace girih::short_conv

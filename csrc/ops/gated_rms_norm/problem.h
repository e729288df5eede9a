// The path of gated_rms_norm.
#pragma once

#include "../arguments/path.h"

namespace girih::gated_rms_norm {

constexpr int64_t kMaxWidth = 8192;  // widest row of the kernels

struct Problem {
  static void check(const Tensor& x, const Tensor& weight, const OptionalTensor& gate,
                    std::string_view activation, double eps) {
    static const auto& op = get_operator("gated_rms_norm");
    girih::check(op, {x, weight, gate, activation, eps});
  }

  static Path path(const Tensor& x) {
    static_assert(kMaxWidth == 8192);
    if (x.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    return x.sym_size(-1) > kMaxWidth ? aten("rows wider than 8192") : fp32(kMemoryBound);
  }
};

}  // namespace girih::gated_rms_norm

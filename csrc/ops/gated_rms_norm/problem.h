// The path of gated_rms_norm.
#pragma once

#include "../arguments/path.h"

namespace girih::gated_rms_norm {

constexpr int64_t kWidest = 8192;  // widest row of the kernels

struct Problem {
  static void check(const Tensor& x, const Tensor& weight, const OptionalTensor& gate,
                    std::string_view activation, double eps) {
    static const auto& op = describe("gated_rms_norm");
    girih::check(op, {x, weight, gate, activation, eps});
  }

  static Path path(const Tensor& x) {
    static_assert(kWidest == 8192);
    if (x.scalar_type() == at::kDouble) return aten(kFloat64);
    return x.sym_size(-1) > kWidest ? aten("rows wider than 8192") : exact(kMemoryBound);
  }
};

}  // namespace girih::gated_rms_norm

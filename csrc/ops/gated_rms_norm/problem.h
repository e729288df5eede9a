// What gated_rms_norm accepts.
#pragma once

#include "../check.h"

namespace girih::gated_rms_norm {

struct Problem {
  static void check(const Tensor& x, const Tensor& weight, const OptionalTensor& gate,
                    std::string_view activation) {
    const Check check("gated_rms_norm", "x", x);
    GIRIH_CHECK(x.dim() >= 1, "gated_rms_norm: x has shape ", x.sym_sizes(), " but should be [..., dim]");
    check.floating("weight", weight);
    check.over_last("weight", weight, "[dim]");
    check.at_least_one("dim", x.sym_size(-1));
    if (given(gate)) {
      check.same_dtype("gate", *gate);
      check.same_shape("gate", *gate);
    }
    check.one_of("activation", activation, {"silu", "gelu", "sigmoid"});
  }
};

}  // namespace girih::gated_rms_norm

// What short_conv accepts.
#pragma once

#include "../check.h"

namespace girih::short_conv {

struct Problem {
  c10::SymInt B, T, channels, W, N;

  static Problem check(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& state_x, const OptionalTensor& cu_seqlens,
                       std::optional<std::string_view> activation) {
    const Check check("short_conv", "x", x);
    check.rank("x", x, 3, "[B, T, channels]");
    check.rank("weight", weight, 2, "[channels, W]");
    const Problem p{x.sym_size(0), x.sym_size(1), x.sym_size(2), weight.sym_size(1),
                    check.sequences(cu_seqlens, x.sym_size(0))};
    check.floating("weight", weight);
    check.shape("weight", weight, {p.channels, p.W}, "[channels, W]");
    GIRIH_CHECK(p.W >= 1 && p.W <= 4, "short_conv: weight has width W = ", p.W, " but should have 1 to 4");
    if (given(bias)) {
      check.floating("bias", *bias);
      check.shape("bias", *bias, {p.channels}, "[channels]");
    }
    if (given(state_x)) {
      check.same_dtype("state_x", *state_x);
      check.shape("state_x", *state_x, {p.N, p.W - 1, p.channels}, "[N, W-1, channels]");
    }
    if (activation) check.one_of("activation", *activation, {"silu"});
    return p;
  }
};

}  // namespace girih::short_conv

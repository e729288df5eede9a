// The sizes of a call of cat_attention. Forward saves lse [B, T, HQ], fp32 or fp64: the log-sum-exp of a
// row's scores.
#pragma once

#include "../path.h"

namespace girih::cat_attention {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_chunks,
                       int64_t chunk, std::optional<double> scale) {
    static const auto& op = describe("cat_attention");
    const auto at = girih::check(op, {q, k, v, cu_chunks, chunk, scale});
    return {at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"]};
  }

  static Path path() { return aten("cat_attention has no kernels yet"); }
};

}  // namespace girih::cat_attention

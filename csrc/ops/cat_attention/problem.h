// What cat_attention accepts. Forward saves lse [B, T, HQ], fp32 or fp64: the log-sum-exp of a row's scores.
#pragma once

#include "../check.h"

namespace girih::cat_attention {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_chunks,
                       int64_t chunk) {
    const Check check("cat_attention", "q", q);
    const auto s = check.qkv(q, k, v, std::nullopt, {});
    const Problem p{s.B, s.T, s.HQ, s.H, s.key, s.value};
    GIRIH_CHECK(chunk >= 2 && chunk <= 256, "cat_attention: chunk is ", chunk, " but should be 2 to 256");
    check.packed("cu_chunks", cu_chunks, p.B);
    return p;
  }
};

}  // namespace girih::cat_attention

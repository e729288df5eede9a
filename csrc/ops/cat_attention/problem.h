// What cat_attention accepts. Forward saves lse [B, T, HQ], fp32 or fp64: the log-sum-exp of a row's scores.
#pragma once

#include "../check.h"

namespace girih::cat_attention {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_chunks,
                       int64_t chunk) {
    const Check check("cat_attention", "q", q);
    check.rank("q", q, 4, "[B, T, H, D]");
    check.rank("k", k, 4, "[B, T, H, D]");
    check.rank("v", v, 4, "[B, T, H, V]");
    const Problem p{q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2), q.sym_size(3), v.sym_size(3)};
    check.grouped(p.HQ, p.H);
    check.at_least_one("D", p.D);
    check.at_least_one("V", p.V);
    check.same_dtype("k", k);
    check.same_dtype("v", v);
    check.shape("k", k, {p.B, p.T, p.H, p.D}, "[B, T, H, D]");
    check.shape("v", v, {p.B, p.T, p.H, p.V}, "[B, T, H, V]");
    GIRIH_CHECK(chunk >= 2 && chunk <= 256, "cat_attention: chunk is ", chunk, " but should be 2 to 256");
    check.sequences("cu_chunks", cu_chunks, p.B);
    return p;
  }
};

}  // namespace girih::cat_attention

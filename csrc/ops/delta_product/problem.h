// What delta_product accepts (maths.md section 2): sizes in the paper's letters.
#pragma once

#include "../check.h"

namespace girih::delta_product {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                       const OptionalTensor& g, const OptionalTensor& state_s,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                       std::optional<int64_t> chunk, std::optional<std::string_view> between_chunks) {
    const Check check("delta_product", "q", q);
    check.rank("q", q, 4, "[B, T, H, D]");
    check.rank("k", k, 4, "[B, T * n, H, D]");
    check.rank("v", v, 4, "[B, T * n, H, V]");
    check.at_least_one("n", n);
    const Problem p{q.sym_size(0),
                    q.sym_size(1),
                    q.sym_size(2),
                    k.sym_size(2),
                    q.sym_size(3),
                    v.sym_size(3),
                    check.sequences("cu_seqlens", cu_seqlens, q.sym_size(0))};
    const auto rows = p.T * n;
    check.grouped(p.HQ, p.H);
    check.at_least_one("D", p.D);
    check.at_least_one("V", p.V);
    check.same_dtype("k", k);
    check.same_dtype("v", v);
    check.shape("k", k, {p.B, rows, p.H, p.D}, "[B, T * n, H, D]");
    check.shape("v", v, {p.B, rows, p.H, p.V}, "[B, T * n, H, V]");
    check.floating("beta", beta);
    if (beta.dim() == 4) {
      check.shape("beta", beta, {p.B, rows, p.H, p.D}, "[B, T * n, H] or [B, T * n, H, D]");
      GIRIH_CHECK(p.D.sym_eq(p.V).expect_true(__FILE__, __LINE__),
                  "delta_product: beta is a vector [B, T * n, H, D], so v's width V should be D = ", p.D,
                  " but is ", p.V);
    } else {
      check.shape("beta", beta, {p.B, rows, p.H}, "[B, T * n, H] or [B, T * n, H, D]");
    }
    if (given(g)) {
      check.floating("g", *g);
      check.shape("g", *g, {p.B, p.T, p.H}, "[B, T, H]");
    }
    if (between_chunks) {
      check.one_of("between_chunks", *between_chunks, {"gelu", "tanh"});
      GIRIH_CHECK(
          chunk,
          "delta_product: chunk is None but should be 1 to 64 with between_chunks: it is part of the model");
      GIRIH_CHECK(*chunk >= 1 && *chunk <= 64, "delta_product: chunk is ", *chunk, " but should be 1 to 64");
    } else {
      GIRIH_CHECK(!chunk, "delta_product: chunk is ", *chunk,
                  " but should be None without between_chunks: it cannot change the result");
    }
    if (given(state_s)) {
      check.state_dtype("state_s", *state_s);
      check.shape("state_s", *state_s, {p.N, p.H, p.D, p.V}, "[N, H, D, V]");
    }
    GIRIH_CHECK(given(state_position) == (between_chunks.has_value() && given(state_s)),
                "delta_product: state_position is ", given(state_position) ? "given" : "None",
                " but should be given exactly when state_s and between_chunks are");
    if (given(state_position)) check.position(*state_position, p.N);
    return p;
  }
};

}  // namespace girih::delta_product

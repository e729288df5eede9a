// What trellis accepts (maths.md section 3): sizes in the paper's letters.
#pragma once

#include "../check.h"

namespace girih::trellis {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, M, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                       const Tensor& gamma, const OptionalTensor& g, const OptionalTensor& state_first_k,
                       const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                       const OptionalTensor& state_v, const OptionalTensor& state_position,
                       const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi,
                       std::string_view f) {
    const Check check("trellis", "q", q);
    check.rank("q", q, 4, "[B, T, H, D]");
    check.rank("k", k, 4, "[B, T, H, D]");
    check.rank("v", v, 4, "[B, T, H, V]");
    check.rank("a", a, 4, "[B, T, H, M]");
    const Problem p{q.sym_size(0), q.sym_size(1),
                    q.sym_size(2), k.sym_size(2),
                    q.sym_size(3), v.sym_size(3),
                    a.sym_size(3), check.sequences("cu_seqlens", cu_seqlens, q.sym_size(0))};
    check.grouped(p.HQ, p.H);
    check.at_least_one("D", p.D);
    check.at_least_one("V", p.V);
    check.at_least_one("M", p.M);
    check.same_dtype("k", k);
    check.same_dtype("v", v);
    check.same_dtype("a", a);
    check.shape("k", k, {p.B, p.T, p.H, p.D}, "[B, T, H, D]");
    check.shape("v", v, {p.B, p.T, p.H, p.V}, "[B, T, H, V]");
    check.shape("a", a, {p.B, p.T, p.H, p.M}, "[B, T, H, M]");
    check.floating("gamma", gamma);
    check.shape("gamma", gamma, {p.B, p.T, p.H}, "[B, T, H]");
    if (given(g)) {
      check.floating("g", *g);
      check.shape("g", *g, {p.B, p.T, p.H}, "[B, T, H]");
    }
    GIRIH_CHECK(chunk >= 1 && chunk <= 64, "trellis: chunk is ", chunk, " but should be 1 to 64");
    for (const auto& [name, value] : {std::pair{"phi", phi}, std::pair{"f", f}}) {
      check.one_of(name, value,
                   {"identity", "silu", "l2norm", "layer_norm", "l2_silu", "ln_silu", "softmax"});
    }
    GIRIH_CHECK(
        given(state_k) && given(state_v),
        "trellis: state is None but should be a TrellisState or the first memories A1 [H, M, D] and A2 "
        "[H, M, V]: there is no zero start");
    GIRIH_CHECK(given(state_first_k) == given(state_first_v),
                "trellis: state_first_k and state_first_v come together; only ",
                given(state_first_k) ? "state_first_k" : "state_first_v", " is given");
    GIRIH_CHECK(given(state_first_k) || !given(state_position),
                "trellis: state_first_k is None but should be the memory at the start of the chunk when "
                "state_position is given");
    for (const auto& [name, state] :
         {std::pair{"state_first_k", state_first_k}, std::pair{"state_k", state_k}}) {
      if (!given(state)) continue;
      check.state_dtype(name, *state);
      check.shape(name, *state, {p.N, p.H, p.M, p.D}, "[N, H, M, D]");
    }
    for (const auto& [name, state] :
         {std::pair{"state_first_v", state_first_v}, std::pair{"state_v", state_v}}) {
      if (!given(state)) continue;
      check.state_dtype(name, *state);
      check.shape(name, *state, {p.N, p.H, p.M, p.V}, "[N, H, M, V]");
    }
    if (given(state_position)) check.position(*state_position, p.N);
    return p;
  }
};

}  // namespace girih::trellis

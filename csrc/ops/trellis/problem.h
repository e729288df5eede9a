// What trellis accepts: sizes in the paper's letters.
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
    const auto s = check.qkv(q, k, v, cu_seqlens, {});
    check.rank("a", a, 4, "[B, T, H, M]");
    const Problem p{s.B, s.T, s.HQ, s.H, s.key, s.value, a.sym_size(3), s.N};
    check.at_least_one("M", p.M);
    check.same_dtype("a", a);
    check.shape("a", a, {p.B, p.T, p.H, p.M}, "[B, T, H, M]");
    check.per_head("gamma", gamma, s);
    check.per_head("g", g, s);
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
    check.state("state_first_k", state_first_k, {p.N, p.H, p.M, p.D}, "[N, H, M, D]");
    check.state("state_k", state_k, {p.N, p.H, p.M, p.D}, "[N, H, M, D]");
    check.state("state_first_v", state_first_v, {p.N, p.H, p.M, p.V}, "[N, H, M, V]");
    check.state("state_v", state_v, {p.N, p.H, p.M, p.V}, "[N, H, M, V]");
    if (given(state_position)) check.position(*state_position, p.N);
    return p;
  }
};

}  // namespace girih::trellis

// What gsa accepts: sizes in the paper's letters.
#pragma once

#include "../kept_states.h"

namespace girih::gsa {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, M, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                       const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                       const OptionalTensor& state_z, const OptionalTensor& cu_seqlens,
                       std::string_view feature) {
    const Check check("gsa", "q", q);
    const auto sizes = check.qkv(q, k, v, cu_seqlens, {});
    GIRIH_CHECK(given(s) || given(g),
                "gsa: s and g are both None; give s (slot weights), g (log gates), or both");
    const auto& slots = given(s) ? *s : *g;
    check.rank(given(s) ? "s" : "g", slots, 4, "[B, T, H, M]");
    const Problem p{sizes.B, sizes.T, sizes.HQ, sizes.H, sizes.key, sizes.value, slots.sym_size(3), sizes.N};
    check.at_least_one("M", p.M);
    if (given(s)) {
      check.floating("s", *s);
      check.shape("s", *s, {p.B, p.T, p.H, p.M}, "[B, T, H, M]");
    }
    if (given(g)) {
      check.floating("g", *g);
      check.shape("g", *g, {p.B, p.T, p.H, p.M}, "[B, T, H, M]");
    }
    check.one_of("feature", feature, {"softmax", "none", "silu", "relu", "relu2"});
    GIRIH_CHECK(given(state_k) == given(state_v), "gsa: state_k and state_v come together; only ",
                given(state_k) ? "state_k" : "state_v", " is given");
    check.state("state_k", state_k, {p.N, p.H, p.D, p.M}, "[N, H, D, M]");
    check.state("state_v", state_v, {p.N, p.H, p.M, p.V}, "[N, H, M, V]");
    GIRIH_CHECK(given(state_z) == (!given(g) && given(state_k)), "gsa: state_z is ",
                given(state_z) ? "given" : "None", " but belongs to a state exactly when g is None (ABC)");
    check.state("state_z", state_z, {p.N, p.H, p.M}, "[N, H, M]");
    return p;
  }

  // What forward keeps for backward; nothing without g.
  std::vector<c10::SymInt> saved(const Tensor& q, const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                                 bool save) const {
    if (!save || !given(g)) return {0};
    return kept_states(q, N, H, {D, V}, M, cu_seqlens);
  }
};

}  // namespace girih::gsa

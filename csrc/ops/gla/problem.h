// What gla accepts: linear attention, plain, with one gate a head, or with one a key channel.
#pragma once

#include "../kept_states.h"

namespace girih::gla {

// A gate a key channel; else one a head, or none.
inline bool by_channel(const OptionalTensor& g) { return given(g) && g->dim() == 4; }

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                       const OptionalTensor& state_s, const OptionalTensor& cu_seqlens) {
    const Check check("gla", "q", q);
    const auto s = check.qkv(q, k, v, cu_seqlens, {});
    const Problem p{s.B, s.T, s.HQ, s.H, s.key, s.value, s.N};
    if (given(g)) {
      check.floating("g", *g);
      if (g->dim() == 3) {
        check.shape("g", *g, {p.B, p.T, p.H}, "[B, T, H]");
      } else {
        check.shape("g", *g, {p.B, p.T, p.H, p.D}, "[B, T, H] or [B, T, H, D]");
      }
    }
    check.state("state_s", state_s, {p.N, p.H, p.D, p.V}, "[N, H, D, V]");
    return p;
  }

  // What forward keeps for backward.
  std::vector<c10::SymInt> saved(const Tensor& q, const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                                 bool save) const {
    if (!save) return {0};
    return by_channel(g) ? kept_states(q, N, H, {V}, D, cu_seqlens, kByChannel, kKeptChunk)
                         : kept_states(q, N, H, {V}, D, cu_seqlens, kByHead, kKeptPair);
  }
};

}  // namespace girih::gla

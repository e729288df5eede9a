// What gla accepts: linear attention, plain, with one gate a head, or with one a key channel.
#pragma once

#include "../check.h"

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

  // What forward keeps for backward: the tensor cores' state before every chunk, in packs of 8 columns. Their
  // kernels exist for 16-bit elements and, by the kind of gate, so many channels; everywhere else nothing is
  // kept.
  std::vector<c10::SymInt> saved(const Tensor& q, const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                                 bool save) const {
    const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
    if (!save || !half || (by_channel(g) ? D > 128 || V > 512 : D > 256)) return {0};
    const auto padded = [](const c10::SymInt& width) { return (width + 7) / 8 * 8; };
    const auto chunks = given(cu_seqlens) && cu_seqlens->dim() == 1 ? T / 64 + N : B * ((T + 63) / 64);
    return {chunks, H, padded(V), padded(D)};
  }
};

}  // namespace girih::gla

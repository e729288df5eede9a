// What gla accepts: linear attention, plain, with one gate a head, or with one a key channel.
#pragma once

#include "../check.h"

namespace girih::gla {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                       const OptionalTensor& state_s, const OptionalTensor& cu_seqlens) {
    const Check check("gla", "q", q);
    check.rank("q", q, 4, "[B, T, H, D]");
    check.rank("k", k, 4, "[B, T, H, D]");
    check.rank("v", v, 4, "[B, T, H, V]");
    const Problem p{q.sym_size(0),
                    q.sym_size(1),
                    q.sym_size(2),
                    k.sym_size(2),
                    q.sym_size(3),
                    v.sym_size(3),
                    check.sequences("cu_seqlens", cu_seqlens, q.sym_size(0))};
    check.grouped(p.HQ, p.H);
    check.at_least_one("D", p.D);
    check.at_least_one("V", p.V);
    check.same_dtype("k", k);
    check.same_dtype("v", v);
    check.shape("k", k, {p.B, p.T, p.H, p.D}, "[B, T, H, D]");
    check.shape("v", v, {p.B, p.T, p.H, p.V}, "[B, T, H, V]");
    if (given(g)) {
      check.floating("g", *g);
      if (g->dim() == 3) {
        check.shape("g", *g, {p.B, p.T, p.H}, "[B, T, H]");
      } else {
        check.shape("g", *g, {p.B, p.T, p.H, p.D}, "[B, T, H] or [B, T, H, D]");
      }
    }
    if (given(state_s)) {
      check.state_dtype("state_s", *state_s);
      check.shape("state_s", *state_s, {p.N, p.H, p.D, p.V}, "[N, H, D, V]");
    }
    return p;
  }
};

}  // namespace girih::gla

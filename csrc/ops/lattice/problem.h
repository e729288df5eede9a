// What lattice accepts: sizes in the paper's letters.
#pragma once

#include "../check.h"

namespace girih::lattice {

struct Problem {
  c10::SymInt B, T, HQ, H, M, D, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                       const OptionalTensor& g, const OptionalTensor& state_first,
                       const OptionalTensor& state_step, const OptionalTensor& state_decay,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                       std::string_view objective, bool normalize, double shrinkage) {
    const Check check("lattice", "q", q);
    const auto s = check.qkv(q, k, v, cu_seqlens, {.key = "M", .value = "D"});
    const Problem p{s.B, s.T, s.HQ, s.H, s.key, s.value, s.N};
    check.per_head("gamma", gamma, s);
    check.per_head("g", g, s);
    GIRIH_CHECK(chunk >= 1 && chunk <= 64, "lattice: chunk is ", chunk, " but should be 1 to 64");
    check.one_of("objective", objective, {"decode", "encode", "similarity"});
    GIRIH_CHECK(normalize || chunk == 1, "lattice: normalize is False, so chunk should be 1 but is ", chunk);
    GIRIH_CHECK(shrinkage >= 0, "lattice: shrinkage is ", shrinkage, " but should be at least 0");
    GIRIH_CHECK(shrinkage == 0 || chunk == 1, "lattice: shrinkage is ", shrinkage,
                ", so chunk should be 1 but is ", chunk);
    GIRIH_CHECK(
        given(state_first),
        "lattice: state is None but should be a LatticeState or the first memory S [H, D, M]: there is no "
        "zero start");
    check.state("state_first", state_first, {p.N, p.H, p.D, p.M}, "[N, H, D, M]");
    check.state("state_step", state_step, {p.N, p.H, p.D, p.M}, "[N, H, D, M]");
    GIRIH_CHECK(given(g) || !given(state_decay),
                "lattice: state_decay is given but should be None when g is None");
    check.state("state_decay", state_decay, {p.N, p.H}, "[N, H]");
    if (given(state_position)) {
      check.position(*state_position, p.N);
      GIRIH_CHECK(given(state_step),
                  "lattice: state_step is None but should be the steps that the chunk has "
                  "accumulated when state_position is given");
      GIRIH_CHECK(!given(g) || given(state_decay),
                  "lattice: state_decay is None but should be the sum of the chunk's "
                  "gates so far when g and state_position are given");
    }
    return p;
  }
};

}  // namespace girih::lattice

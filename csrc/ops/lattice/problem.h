// What lattice accepts (maths.md section 4): sizes in the paper's letters.
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
    check.rank("q", q, 4, "[B, T, H, M]");
    check.rank("k", k, 4, "[B, T, H, M]");
    check.rank("v", v, 4, "[B, T, H, D]");
    const Problem p{q.sym_size(0),
                    q.sym_size(1),
                    q.sym_size(2),
                    k.sym_size(2),
                    q.sym_size(3),
                    v.sym_size(3),
                    check.sequences("cu_seqlens", cu_seqlens, q.sym_size(0))};
    check.grouped(p.HQ, p.H);
    check.at_least_one("M", p.M);
    check.at_least_one("D", p.D);
    check.same_dtype("k", k);
    check.same_dtype("v", v);
    check.shape("k", k, {p.B, p.T, p.H, p.M}, "[B, T, H, M]");
    check.shape("v", v, {p.B, p.T, p.H, p.D}, "[B, T, H, D]");
    check.floating("gamma", gamma);
    check.shape("gamma", gamma, {p.B, p.T, p.H}, "[B, T, H]");
    if (given(g)) {
      check.floating("g", *g);
      check.shape("g", *g, {p.B, p.T, p.H}, "[B, T, H]");
    }
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
    check.state_dtype("state_first", *state_first);
    check.shape("state_first", *state_first, {p.N, p.H, p.D, p.M}, "[N, H, D, M]");
    if (given(state_step)) {
      check.state_dtype("state_step", *state_step);
      check.shape("state_step", *state_step, {p.N, p.H, p.D, p.M}, "[N, H, D, M]");
    }
    if (given(state_decay)) {
      GIRIH_CHECK(given(g), "lattice: state_decay is given but should be None when g is None");
      check.state_dtype("state_decay", *state_decay);
      check.shape("state_decay", *state_decay, {p.N, p.H}, "[N, H]");
    }
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

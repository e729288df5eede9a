// What lattice asks of a call beyond its description.
#pragma once

#include "../path.h"

namespace girih::lattice {

struct Problem {
  c10::SymInt B, T, HQ, H, M, D, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma,
                       const OptionalTensor& g, const OptionalTensor& state_first,
                       const OptionalTensor& state_step, const OptionalTensor& state_decay,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                       std::string_view objective, bool normalize, double shrinkage) {
    static const auto& op = describe("lattice");
    const auto at = girih::check(op, {q, k, v, gamma, g, state_first, state_step, state_decay, state_position,
                                      cu_seqlens, chunk, objective, normalize, shrinkage});
    GIRIH_CHECK(normalize || chunk == 1, "lattice: normalize is False, so chunk should be 1 but is ", chunk);
    GIRIH_CHECK(shrinkage == 0 || chunk == 1, "lattice: shrinkage is ", shrinkage,
                ", so chunk should be 1 but is ", chunk);
    GIRIH_CHECK(
        given(state_first),
        "lattice: state is None but should be a LatticeState or the first memory S [H, D, M]: there is no "
        "zero start");
    GIRIH_CHECK(given(g) || !given(state_decay),
                "lattice: state_decay is given but should be None when g is None");
    if (given(state_position)) {
      GIRIH_CHECK(given(state_step),
                  "lattice: state_step is None but should be the steps that the chunk has "
                  "accumulated when state_position is given");
      GIRIH_CHECK(!given(g) || given(state_decay),
                  "lattice: state_decay is None but should be the sum of the chunk's "
                  "gates so far when g and state_position are given");
    }
    return {at["B"], at["T"], at["HQ"], at["H"], at["M"], at["D"], at["N"]};
  }

  static Path path() { return aten("lattice has no kernels yet"); }
};

}  // namespace girih::lattice

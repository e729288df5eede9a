// The conditions of ttt beyond its declaration, its path, and its saved tensors.
#pragma once

#include "../trellis/problem.h"

namespace girih::ttt {

// The problem of Trellis with one memory.
struct Problem : trellis::Problem {
  static Problem check(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                       const OptionalTensor& g, const OptionalTensor& phi_weight,
                       const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                       const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                       std::string_view phi, std::string_view f) {
    static const auto& op = describe("ttt");
    const auto at = girih::check(op, {q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                                      cu_seqlens, chunk, phi, f});
    GIRIH_CHECK(given(state_k),
                "ttt: state is None but should be a TTTState or the first memory A [H, M, D]: there is no "
                "zero start");
    GIRIH_CHECK(given(state_first_k) || !given(state_position),
                "ttt: state_first_k is None but should be the memory at the start of the chunk when "
                "state_position is given");
    return {{at["B"], at["T"], at["HQ"], at["H"], at["D"], 0, at["M"], at["N"], 1, given(phi_weight),
             phi == "softmax"}};
  }
};

}  // namespace girih::ttt

// What trellis asks of a call beyond its description.
#pragma once

#include "../path.h"

namespace girih::trellis {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, M, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                       const Tensor& gamma, const OptionalTensor& g, const OptionalTensor& state_first_k,
                       const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                       const OptionalTensor& state_v, const OptionalTensor& state_position,
                       const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi,
                       std::string_view f) {
    static const auto& op = describe("trellis");
    const auto at = girih::check(op, {q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                      state_position, cu_seqlens, chunk, phi, f});
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
    return {at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"], at["M"], at["N"]};
  }

  static Path path() { return aten("trellis has no kernels yet"); }
};

}  // namespace girih::trellis

// What trellis asks of a call beyond its description, which kernels take it, and what forward keeps.
#pragma once

#include "../kept_within.h"
#include "../path.h"

namespace girih::trellis {

constexpr int64_t kWidest = 128;  // M, D and V of the kernels

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

  Path path(const Tensor& q) const {
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (q.scalar_type() == at::kFloat) return aten("float32 has no kernels: products of 16 bits would round");
    if (M > kWidest || D > kWidest || V > kWidest) return aten("slots, keys or values wider than 128");
    return tensor_cores();
  }
  static Path step_path(const Tensor& q) {
    return q.scalar_type() == at::kDouble ? aten(kFloat64) : exact(kMemoryBound);
  }

  // Of a head of queries each: the memories before every chunk, in tiles, z and u of every token, and what
  // z's rows come to.
  struct Kept {
    std::vector<c10::SymInt> memories, tokens, fit;
  };
  Kept saved(const Tensor& q, const OptionalTensor& position, const OptionalTensor& cu_seqlens, int64_t chunk,
             bool save) const {
    if (!save || path(q) != Path::Code::tensor_cores) return {{0}, {0}, {0}};
    const auto chunks = kept_within(q, N, position, cu_seqlens, chunk);
    const int64_t tile = M <= 64 && D <= 64 && V <= 64 ? 64 : 128;
    return {{chunks, HQ, tile, tile}, {2, B, T, HQ, kept_width(M)}, {2, B, T, HQ, 4}};
  }
};

}  // namespace girih::trellis

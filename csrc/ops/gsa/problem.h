// The conditions of gsa beyond its declaration, its path, and its saved tensors.
#pragma once

#include "../arguments/path.h"
#include "../chunks/saved_states.h"

namespace girih::gsa {

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, M, N;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                       const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                       const OptionalTensor& state_z, const OptionalTensor& cu_seqlens,
                       std::optional<double> scale, std::string_view feature) {
    static const auto& op = describe("gsa");
    GIRIH_CHECK(
        given(s) || given(g),
        "gsa: s and g are both None but one should be a tensor: s (slot weights), g (log gates), or both");
    const auto at = girih::check(op, {q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature});
    GIRIH_CHECK(given(state_k) == given(state_v), "gsa: ", given(state_k) ? "state_v" : "state_k",
                " is None but should be a tensor: a state has both state_k and state_v");
    GIRIH_CHECK(given(state_z) == (!given(g) && given(state_k)), "gsa: state_z is ",
                given(state_z) ? "a tensor but should be None: " : "None but should be a tensor: ",
                "it belongs to a state if and only if g is None (ABC)");
    return {at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"], at["M"], at["N"]};
  }

  Path path(const Tensor& q, const OptionalTensor& g) const {
    static_assert(kByChannel.columns == 128 && kByChannel.rows == 512);
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (q.scalar_type() == at::kFloat) return exact(kFloat32);
    if (!given(g)) {
      return exact(
          "g is None: the gates of ABC are differences of running sums, which 16 bits do not resolve");
    }
    if (M > kByChannel.columns) return exact("more than 128 slots");
    if (D > kByChannel.rows || V > kByChannel.rows) return exact("keys or values wider than 512");
    return tensor_cores();
  }
  static Path step_path(const Tensor& q) {
    return q.scalar_type() == at::kDouble ? aten(kFloat64) : exact(kMemoryBound);
  }

  // The shape of the states that the tensor-core kernels save, before every chunk; {0} on other paths.
  std::vector<c10::SymInt> saved(const Tensor& q, const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                                 bool save) const {
    if (!save || path(q, g) != Path::Code::tensor_cores) return {0};
    return kept_states(q, N, H, {D, V}, M, cu_seqlens);
  }
};

}  // namespace girih::gsa

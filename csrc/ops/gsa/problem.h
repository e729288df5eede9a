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
    static const auto& op = get_operator("gsa");
    GIRIH_CHECK(
        is_defined(s) || is_defined(g),
        "gsa: s and g are both None but one should be a tensor: s (slot weights), g (log gates), or both");
    const auto at = girih::check(op, {q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature});
    GIRIH_CHECK(is_defined(state_k) == is_defined(state_v),
                "gsa: ", is_defined(state_k) ? "state_v" : "state_k",
                " is None but should be a tensor: a state has both state_k and state_v");
    GIRIH_CHECK(is_defined(state_z) == (!is_defined(g) && is_defined(state_k)), "gsa: state_z is ",
                is_defined(state_z) ? "a tensor but should be None: " : "None but should be a tensor: ",
                "it belongs to a state if and only if g is None (ABC)");
    return {at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"], at["M"], at["N"]};
  }

  Path path(const Tensor& q, const OptionalTensor& g) const {
    static_assert(kChannelGateLimits.columns == 128 && kChannelGateLimits.rows == 512);
    if (q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (q.scalar_type() == at::kFloat) return fp32(kFloat32Reason);
    if (!is_defined(g)) {
      return fp32(
          "g is None: the gates of ABC are differences of running sums, which 16 bits do not resolve");
    }
    if (M > kChannelGateLimits.columns) return fp32("more than 128 slots");
    if (D > kChannelGateLimits.rows || V > kChannelGateLimits.rows)
      return fp32("keys or values wider than 512");
    return tensor_cores();
  }
  static Path step_path(const Tensor& q) {
    return q.scalar_type() == at::kDouble ? aten(kNoFloat64Kernels) : fp32(kMemoryBound);
  }

  // The shape of the states that the tensor-core kernels save, before every chunk; {0} on other paths.
  std::vector<c10::SymInt> saved(const Tensor& q, const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                                 bool save) const {
    if (!save || path(q, g) != Path::Code::tensor_cores) return {0};
    return saved_states_shape(q, N, H, {D, V}, M, cu_seqlens);
  }
};

}  // namespace girih::gsa

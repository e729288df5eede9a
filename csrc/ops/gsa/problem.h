// The arguments of gsa, their conditions beyond the declaration, the path, and the saved tensors.
#pragma once

#include "../arguments/path.h"
#include "../chunks/saved_states.h"
#include "../registration/call.h"

namespace girih::gsa {

struct Call {
  static constexpr const char* name = "gsa";
  static constexpr size_t data_count = 5;
  using StepState = Types<Tensor, Tensor, OptionalTensor>;
  static auto arguments(auto& c) {
    return std::tie(c.q, c.k, c.v, c.s, c.g, c.state_k, c.state_v, c.state_z, c.cu_seqlens, c.scale,
                    c.feature);
  }

  Tensor q, k, v;
  OptionalTensor s, g, state_k, state_v, state_z, cu_seqlens;
  std::optional<double> scale;
  std::string_view feature;

  double query_scale() const { return scale_or_default(scale, q.size(3)); }
};

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, M, N;

  static Problem check(const Call& call) {
    const auto &s = call.s, &g = call.g;
    GIRIH_CHECK(
        is_defined(s) || is_defined(g),
        "gsa: s and g are both None but one should be a tensor: s (slot weights), g (log gates), or both");
    const auto sizes = check_declaration(call);
    const bool has_k = is_defined(call.state_k), has_v = is_defined(call.state_v),
               has_z = is_defined(call.state_z);
    GIRIH_CHECK(has_k == has_v, "gsa: ", has_k ? "state_v" : "state_k",
                " is None but should be a tensor: a state has both state_k and state_v");
    GIRIH_CHECK(has_z == (!is_defined(g) && has_k), "gsa: state_z is ",
                has_z ? "a tensor but should be None: " : "None but should be a tensor: ",
                "it belongs to a state if and only if g is None (ABC)");
    return {sizes["B"], sizes["T"], sizes["HQ"], sizes["H"], sizes["D"], sizes["V"], sizes["M"], sizes["N"]};
  }

  Path path(const Call& call) const {
    static_assert(kChannelGateLimits.columns == 128 && kChannelGateLimits.rows == 512);
    if (call.q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (call.q.scalar_type() == at::kFloat) return fp32(kFloat32Reason);
    if (!is_defined(call.g)) {
      return fp32(
          "g is None: the gates of ABC are differences of running sums, which 16 bits do not resolve");
    }
    if (M > kChannelGateLimits.columns) return fp32("more than 128 slots");
    if (D > kChannelGateLimits.rows || V > kChannelGateLimits.rows)
      return fp32("keys or values wider than 512");
    return tensor_cores();
  }
  static Path step_path(const Call& call) {
    return call.q.scalar_type() == at::kDouble ? aten(kNoFloat64Kernels) : fp32(kMemoryBound);
  }

  // The shape of the states that the tensor-core kernels save, before every chunk; {0} on other paths.
  std::vector<c10::SymInt> saved(const Call& call, bool save) const {
    if (!save || path(call) != Path::Code::tensor_cores) return {0};
    return saved_states_shape(call.q, N, H, {D, V}, M, call.cu_seqlens);
  }
};

}  // namespace girih::gsa

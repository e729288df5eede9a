// The arguments, the path and the saved tensors of gla: linear attention without gates, with one gate per
// head, or with one gate per key channel.
#pragma once

#include "../arguments/path.h"
#include "../chunks/saved_states.h"
#include "../registration/call.h"

namespace girih::gla {

struct Call {
  static constexpr const char* name = "gla";
  static constexpr size_t data_count = 4;
  using StepState = Types<Tensor>;
  static auto arguments(auto& c) { return std::tie(c.q, c.k, c.v, c.g, c.state_s, c.cu_seqlens, c.scale); }

  Tensor q, k, v;
  OptionalTensor g, state_s, cu_seqlens;
  std::optional<double> scale;

  // Whether g has one gate per key channel (else one per head, or none).
  bool has_channel_gates() const { return is_defined(g) && g->dim() == 4; }
  double query_scale() const { return scale_or_default(scale, q.size(3)); }
};

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  c10::SymInt output_heads() const { return HQ.max(H); }

  static Problem check(const Call& call) {
    const auto sizes = check_declaration(call);
    return {sizes["B"], sizes["T"], sizes["HQ"], sizes["H"], sizes["D"], sizes["V"], sizes["N"]};
  }

  Path path(const Call& call) const {
    static_assert(kChannelGateLimits.columns == 128 && kChannelGateLimits.rows == 512 &&
                  kHeadGateLimits.columns == 256);
    if (call.q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (call.q.scalar_type() == at::kFloat) return fp32(kFloat32Reason);
    if (!call.has_channel_gates()) {
      return D > kHeadGateLimits.columns ? fp32("keys wider than 256 with a gate a head, or none")
                                         : tensor_cores();
    }
    if (D > kChannelGateLimits.columns) return fp32("keys wider than 128 with a gate a channel");
    if (V > kChannelGateLimits.rows) return fp32("values wider than 512 with a gate a channel");
    return tensor_cores();
  }
  static Path step_path(const Call& call) {
    return call.q.scalar_type() == at::kDouble ? aten(kNoFloat64Kernels) : fp32(kMemoryBound);
  }

  // The shape of the states that the tensor-core kernels save, before every chunk or pair of chunks; {0} on
  // other paths.
  std::vector<c10::SymInt> saved(const Call& call, bool save) const {
    if (!save || path(call) != Path::Code::tensor_cores) return {0};
    return saved_states_shape(call.q, N, H, {V}, D, call.cu_seqlens,
                              call.has_channel_gates() ? kChunkTokens : kChunkPairTokens);
  }
};

}  // namespace girih::gla

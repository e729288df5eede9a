// The path and the saved tensors of gla: linear attention without gates, with one gate per head, or with one
// gate per key channel.
#pragma once

#include "../arguments/path.h"
#include "../chunks/saved_states.h"

namespace girih::gla {

// Whether g has one gate per key channel (else one per head, or none).
inline bool has_channel_gates(const OptionalTensor& g) { return is_defined(g) && g->dim() == 4; }

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  c10::SymInt output_heads() const { return HQ.max(H); }

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                       const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                       std::optional<double> scale) {
    static const auto& op = get_operator("gla");
    const auto at = girih::check(op, {q, k, v, g, state_s, cu_seqlens, scale});
    return {at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"], at["N"]};
  }

  Path path(const Tensor& q, const OptionalTensor& g) const {
    static_assert(kChannelGateLimits.columns == 128 && kChannelGateLimits.rows == 512 &&
                  kHeadGateLimits.columns == 256);
    if (q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    if (q.scalar_type() == at::kFloat) return fp32(kFloat32Reason);
    if (!has_channel_gates(g)) {
      return D > kHeadGateLimits.columns ? fp32("keys wider than 256 with a gate a head, or none")
                                         : tensor_cores();
    }
    if (D > kChannelGateLimits.columns) return fp32("keys wider than 128 with a gate a channel");
    if (V > kChannelGateLimits.rows) return fp32("values wider than 512 with a gate a channel");
    return tensor_cores();
  }
  static Path step_path(const Tensor& q) {
    return q.scalar_type() == at::kDouble ? aten(kNoFloat64Kernels) : fp32(kMemoryBound);
  }

  // The shape of the states that the tensor-core kernels save, before every chunk or pair of chunks; {0} on
  // other paths.
  std::vector<c10::SymInt> saved(const Tensor& q, const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                                 bool save) const {
    if (!save || path(q, g) != Path::Code::tensor_cores) return {0};
    return saved_states_shape(q, N, H, {V}, D, cu_seqlens,
                              has_channel_gates(g) ? kChunkTokens : kChunkPairTokens);
  }
};

}  // namespace girih::gla

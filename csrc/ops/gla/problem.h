// The path and the saved tensors of gla: linear attention without gates, with one gate per head, or with one
// gate per key channel.
#pragma once

#include "../arguments/path.h"
#include "../chunks/saved_states.h"

namespace girih::gla {

// Whether g has one gate per key channel (else one per head, or none).
inline bool by_channel(const OptionalTensor& g) { return given(g) && g->dim() == 4; }

struct Problem {
  c10::SymInt B, T, HQ, H, D, V, N;

  c10::SymInt output_heads() const { return HQ.max(H); }

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                       const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                       std::optional<double> scale) {
    static const auto& op = describe("gla");
    const auto at = girih::check(op, {q, k, v, g, state_s, cu_seqlens, scale});
    return {at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"], at["N"]};
  }

  Path path(const Tensor& q, const OptionalTensor& g) const {
    static_assert(kByChannel.columns == 128 && kByChannel.rows == 512 && kByHead.columns == 256);
    if (q.scalar_type() == at::kDouble) return aten(kFloat64);
    if (q.scalar_type() == at::kFloat) return exact(kFloat32);
    if (!by_channel(g)) {
      return D > kByHead.columns ? exact("keys wider than 256 with a gate a head, or none") : tensor_cores();
    }
    if (D > kByChannel.columns) return exact("keys wider than 128 with a gate a channel");
    if (V > kByChannel.rows) return exact("values wider than 512 with a gate a channel");
    return tensor_cores();
  }
  static Path step_path(const Tensor& q) {
    return q.scalar_type() == at::kDouble ? aten(kFloat64) : exact(kMemoryBound);
  }

  // The shape of the states that the tensor-core kernels save, before every chunk or pair of chunks; {0} on
  // other paths.
  std::vector<c10::SymInt> saved(const Tensor& q, const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                                 bool save) const {
    if (!save || path(q, g) != Path::Code::tensor_cores) return {0};
    return kept_states(q, N, H, {V}, D, cu_seqlens, by_channel(g) ? kKeptChunk : kKeptPair);
  }
};

}  // namespace girih::gla

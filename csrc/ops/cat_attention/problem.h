// The sizes and the path of cat_attention. Forward saves the output and lse [B, T, HQ] (fp32 or fp64), the
// log-sum-exp of the scores of a row.
#pragma once

#include "../arguments/path.h"
#include "../chunks/touched_chunks.h"

namespace girih::cat_attention {

constexpr int64_t kMaxWidth = 256, kMaxFloatWidth = 128;  // D and V of the kernels: 16 bits, fp32
constexpr int64_t kMaxTokens = (1u << 31) - (1u << 16);   // largest T of the kernels

struct Problem {
  c10::SymInt B, T, HQ, H, D, V;

  static Problem check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_chunks,
                       int64_t chunk, std::optional<double> scale) {
    static const auto& op = get_operator("cat_attention");
    const auto at = girih::check(op, {q, k, v, cu_chunks, chunk, scale});
    return {at["B"], at["T"], at["HQ"], at["H"], at["D"], at["V"]};
  }

  Path path(const Tensor& q) const {
    if (q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    static_assert(kMaxWidth == 256 && kMaxFloatWidth == 128);
    const bool wide = q.scalar_type() == at::kFloat;
    if (D > kMaxWidth || V > kMaxWidth) return aten("keys or values wider than 256");
    if (wide && (D > kMaxFloatWidth || V > kMaxFloatWidth))
      return aten("float32 keys or values wider than 128");
    if (T > kMaxTokens) return aten("more rows than 32-bit indices reach");
    return wide ? tensor_cores(k3xTF32) : tensor_cores();
  }
};

}  // namespace girih::cat_attention

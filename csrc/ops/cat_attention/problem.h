// The arguments, the sizes and the path of cat_attention. Forward saves the output and lse [B, T, HQ] (fp32
// or fp64), the log-sum-exp of the scores of a row.
#pragma once

#include "../arguments/path.h"
#include "../chunks/saved_states.h"
#include "../registration/call.h"

namespace girih::cat_attention {

constexpr int64_t kMaxWidth = 256, kMaxFloatWidth = 128;  // D and V of the kernels: 16 bits, fp32
constexpr int64_t kMaxTokens = (1u << 31) - (1u << 16);   // largest T of the kernels

struct Call {
  static constexpr const char* name = "cat_attention";
  static constexpr size_t data_count = 3;
  using StepState = Types<>;
  static auto arguments(auto& c) { return std::tie(c.q, c.k, c.v, c.cu_chunks, c.chunk, c.scale); }

  Tensor q, k, v;
  OptionalTensor cu_chunks;
  int64_t chunk;
  std::optional<double> scale;

  double query_scale() const { return scale_or_default(scale, q.size(3)); }
};

struct Problem {
  c10::SymInt B, T, HQ, H, D, V;

  static Problem check(const Call& call) {
    const auto sizes = check_declaration(call);
    return {sizes["B"], sizes["T"], sizes["HQ"], sizes["H"], sizes["D"], sizes["V"]};
  }

  Path path(const Call& call) const {
    if (call.q.scalar_type() == at::kDouble) return aten(kNoFloat64Kernels);
    static_assert(kMaxWidth == 256 && kMaxFloatWidth == 128);
    const bool is_wide = call.q.scalar_type() == at::kFloat;
    if (D > kMaxWidth || V > kMaxWidth) return aten("keys or values wider than 256");
    if (is_wide && (D > kMaxFloatWidth || V > kMaxFloatWidth))
      return aten("float32 keys or values wider than 128");
    if (T > kMaxTokens) return aten("more rows than 32-bit indices reach");
    return is_wide ? tensor_cores(k3xTF32) : tensor_cores();
  }
};

}  // namespace girih::cat_attention

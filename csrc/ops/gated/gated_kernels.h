// gated/: what gsa and gla share. Here: the arguments of their plans.
#pragma once

#include "../arguments/aligned_rows.h"
#include "../arguments/kernel_arguments.h"
#include "../chunks/saved_states.h"
#include "gsa/gsa.h"

namespace girih {

// The kernels: tensor cores for 16-bit elements, or fp32 on the CUDA cores.
enum class KernelKind { tensor, fp32 };

// The tensors of one call as the kernels read them: rows aligned to 16 bytes, g in fp32, s and the states of
// chunks in the dtype of q (fp32 kernels: in fp32).
struct GatedArguments {
  Tensor q, k, v, s, g, cu_seqlens;
  kernels::GsaShape shape;
  int64_t D, V, M;  // widths without padding

  // `one_memory`: gla; the D of the shape is 0.
  GatedArguments(KernelKind kind, const Tensor& q_, const Tensor& k_, const Tensor& v_,
                 const OptionalTensor& s_, const OptionalTensor& g_, int64_t slots, const OptionalTensor& cu,
                 double scale, kernels::Feature feature, bool one_memory = false)
      : q(align_rows(q_)), k(align_rows(k_)), v(align_rows(v_)), D(q_.size(3)), V(v_.size(3)), M(slots) {
    const auto type = kind == KernelKind::fp32 ? at::kFloat : q.scalar_type();
    if (is_defined(s_)) s = align_rows(s_->to(type));
    if (is_defined(g_)) g = align_rows(g_->to(at::kFloat));
    cu_seqlens = contiguous_or_undefined(cu);
    shape = {sequence_layout(q, cu_seqlens),
             static_cast<int>(k.size(2)),
             static_cast<int>(q.size(2)),
             one_memory ? 0 : static_cast<int>(q.size(3)),
             static_cast<int>(v.size(3)),
             static_cast<int>((M + 7) / 8 * 8),
             static_cast<int>(M),
             kind == KernelKind::fp32 ? kernels::DType::f32 : kernel_dtype(q),
             feature,
             static_cast<float>(scale)};
  }

  int group() const { return shape.query_heads / shape.heads; }

  Tensor new_rows(int64_t heads, int64_t width, at::ScalarType type) const {
    return girih::new_rows(q, q.size(1), cu_seqlens, heads, width, type);
  }
  Tensor new_states() const {
    return at::empty(
        {kernels::token_range_count(shape.tokens, kernels::kChunk), shape.heads, shape.D + shape.V, shape.M},
        shape.dtype == kernels::DType::f32 ? q.options().dtype(at::kFloat) : q.options());
  }
  // The states of a memory at one end of every sequence, [N, H, width, M].
  Tensor new_end_states(int width) const {
    return at::empty({shape.tokens.sequences, shape.heads, width, shape.M}, q.options().dtype(at::kFloat));
  }
  // The dtype of the partial gradients of query heads: fp32 if several share a memory and are summed.
  at::ScalarType partial_type() const { return group() == 1 ? q.scalar_type() : at::ScalarType(at::kFloat); }
  Tensor sum_head_groups(const Tensor& partials, int64_t width, const Tensor& x) const {
    return girih::sum_head_groups(partials, shape.heads, width, x);
  }
};

static_assert(kChunkTokens == kernels::kChunk && kChannelGateLimits.columns == kernels::kGsaMaxSlots &&
              kChannelGateLimits.rows == kernels::kGsaMaxWidth);

}  // namespace girih

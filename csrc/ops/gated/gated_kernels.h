// gated/: what gsa and gla share. Here: the arguments and the scan of their kernels.
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

  // `one_memory`: gla; M is the width of g, and the D of the shape is 0.
  GatedArguments(KernelKind kind, const Tensor& q_, const Tensor& k_, const Tensor& v_,
                 const OptionalTensor& s_, const Tensor& g_, const OptionalTensor& cu, double scale,
                 kernels::Feature feature, bool one_memory = false)
      : q(align_rows(q_)),
        k(align_rows(k_)),
        v(align_rows(v_)),
        g(align_rows(g_.to(at::kFloat), 8)),
        D(q_.size(3)),
        V(v_.size(3)),
        M(g_.size(3)) {
    const auto type = kind == KernelKind::fp32 ? at::kFloat : q.scalar_type();
    if (is_defined(s_)) s = align_rows(s_->to(type));
    cu_seqlens = contiguous_or_undefined(cu);
    shape = {sequence_layout(q, cu_seqlens),
             static_cast<int>(k.size(2)),
             static_cast<int>(q.size(2)),
             one_memory ? 0 : static_cast<int>(q.size(3)),
             static_cast<int>(v.size(3)),
             static_cast<int>(g.size(3)),
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
  Tensor sum_head_groups(const Tensor& partials, int64_t width, const Tensor& x) const {
    return girih::sum_head_groups(partials, shape.heads, width, x);
  }
};

static_assert(kChunkTokens == kernels::kChunk && kChannelGateLimits.columns == kernels::kGsaMaxSlots &&
              kChannelGateLimits.rows == kernels::kGsaMaxWidth);

// Tensors of kernels::GateGradientTerms.
struct GateGradientBuffers {
  Tensor is_factored, w;

  explicit GateGradientBuffers(const GatedArguments& a)
      : is_factored(at::empty({kernels::token_range_count(a.shape.tokens, kernels::kChunk), a.shape.heads},
                              a.q.options().dtype(at::kBool))),
        w(a.new_rows(a.shape.query_heads, a.shape.M, at::kFloat)) {}

  const bool* factored_data() const { return is_factored.const_data_ptr<bool>(); }
  kernels::GateGradientTerms arrays() const { return {is_factored.mutable_data_ptr<bool>(), output<4>(w)}; }
};

// The states at the end of a scan: the final states, or the gradients of the initial states if reversed.
struct ScanEnd {
  Tensor k, v;
};
// Runs a scan; `initial_k`, `initial_v` and the returned states are [N, H, width, M].
inline ScanEnd gated_scan(const GatedArguments& a, bool reverse, const Tensor& x0, const Tensor& s0,
                          const Tensor& x1, const Tensor& s1, const Tensor& initial_k,
                          const Tensor& initial_v, const Tensor& states, const bool* is_factored = nullptr) {
  const auto& shape = a.shape;
  const auto options = a.q.options().dtype(at::kFloat);
  const auto N = shape.tokens.sequences;
  const ScanEnd end{at::empty({N, shape.heads, shape.D, shape.M}, options),
                    at::empty({N, shape.heads, shape.V, shape.M}, options)};
  kernels::GatedScan p;
  p.tokens = shape.tokens;
  p.heads = shape.heads;
  p.group = reverse ? a.group() : 1;
  p.M = shape.M;
  p.dtype = shape.dtype;
  p.reverse = reverse;
  p.is_factored = is_factored;
  p.g = input<4>(a.g);
  if (shape.D > 0) p.memory[0] = {input<4>(x0), input<4>(s0), input<4>(initial_k), output<4>(end.k), shape.D};
  p.memory[1] = {input<4>(x1), input<4>(s1), input<4>(initial_v), output<4>(end.v), shape.V};
  p.states = states.mutable_data_ptr();
  const auto workspace = at::empty({kernels::gated_scan_workspace(p)}, options.dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  GIRIH_LAUNCH(gated_scan, p);
  return end;
}

}  // namespace girih

// Arguments and scans shared by the kernels of gsa and gla.
#pragma once

#include "../arguments/aligned_rows.h"
#include "../arguments/kernel_arguments.h"
#include "../chunks/saved_states.h"
#include "gsa/gsa.h"

namespace girih {

// The kernels: tensor cores for 16-bit elements, or fp32 on the CUDA cores.
enum class Kernels { tensor, exact };

// The tensors of one call as the kernels read them: rows aligned to 16 bytes, g in fp32, s and the states of
// chunks in the dtype of q (fp32 kernels: in fp32).
struct GatedArguments {
  Tensor q, k, v, s, g, cu_seqlens;
  kernels::GsaShape shape;
  int64_t D, V, M;  // widths without padding

  // `one_memory`: gla; M is the width of g, and the D of the shape is 0.
  GatedArguments(Kernels by, const Tensor& q_, const Tensor& k_, const Tensor& v_, const OptionalTensor& s_,
                 const Tensor& g_, const OptionalTensor& cu, const std::optional<double>& scale,
                 kernels::Feature feature, bool one_memory = false)
      : q(in_packs(q_)),
        k(in_packs(k_)),
        v(in_packs(v_)),
        g(in_packs(g_.to(at::kFloat), 8)),
        D(q_.size(3)),
        V(v_.size(3)),
        M(g_.size(3)) {
    const auto type = by == Kernels::exact ? at::kFloat : q.scalar_type();
    if (given(s_)) s = in_packs(s_->to(type));
    if (given(cu)) cu_seqlens = cu->contiguous();
    shape = {kernel_tokens(q, cu_seqlens),
             static_cast<int>(k.size(2)),
             static_cast<int>(q.size(2)),
             one_memory ? 0 : static_cast<int>(q.size(3)),
             static_cast<int>(v.size(3)),
             static_cast<int>(g.size(3)),
             static_cast<int>(M),
             by == Kernels::exact ? kernels::DType::f32 : kernel_dtype(q),
             feature,
             static_cast<float>(scale.value_or(1 / std::sqrt(double(D))))};
  }

  int group() const { return shape.query_heads / shape.heads; }

  Tensor rows(int64_t heads, int64_t width, at::ScalarType type) const {
    return rows_for(q, q.size(1), cu_seqlens, heads, width, type);
  }
  Tensor states() const {
    return at::empty(
        {kernels::piece_count(shape.tokens, kernels::kChunk), shape.heads, shape.D + shape.V, shape.M},
        shape.dtype == kernels::DType::f32 ? q.options().dtype(at::kFloat) : q.options());
  }
  Tensor gathered(const Tensor& parts, int64_t width, const Tensor& like) const {
    return girih::gathered(parts, shape.heads, width, like);
  }
};

static_assert(kKeptChunk == kernels::kChunk && kByChannel.columns == kernels::kGsaMaxSlots &&
              kByChannel.rows == kernels::kGsaMaxWidth);

// Tensors of kernels::RowGradients.
struct RowsLeft {
  Tensor factored, w;

  explicit RowsLeft(const GatedArguments& a)
      : factored(at::empty({kernels::piece_count(a.shape.tokens, kernels::kChunk), a.shape.heads},
                           a.q.options().dtype(at::kBool))),
        w(a.rows(a.shape.query_heads, a.shape.M, at::kFloat)) {}

  const bool* how() const { return factored.const_data_ptr<bool>(); }
  kernels::RowGradients arrays() const { return {factored.mutable_data_ptr<bool>(), output<4>(w)}; }
};

// Runs a scan; `first_k`, `first_v` and the returned states are [N, H, width, M].
struct FinalStates {
  Tensor k, v;
};
inline FinalStates gated_scan(const GatedArguments& a, bool reverse, const Tensor& x0, const Tensor& s0,
                              const Tensor& x1, const Tensor& s1, const Tensor& first_k,
                              const Tensor& first_v, const Tensor& states, const bool* factored = nullptr) {
  const auto& shape = a.shape;
  const auto options = a.q.options().dtype(at::kFloat);
  const auto N = shape.tokens.sequences;
  const FinalStates last{at::empty({N, shape.heads, shape.D, shape.M}, options),
                         at::empty({N, shape.heads, shape.V, shape.M}, options)};
  kernels::GatedScan p;
  p.tokens = shape.tokens;
  p.heads = shape.heads;
  p.group = reverse ? a.group() : 1;
  p.M = shape.M;
  p.dtype = shape.dtype;
  p.reverse = reverse;
  p.factored = factored;
  p.g = input<4>(a.g);
  if (shape.D > 0) p.memory[0] = {input<4>(x0), input<4>(s0), input<4>(first_k), output<4>(last.k), shape.D};
  p.memory[1] = {input<4>(x1), input<4>(s1), input<4>(first_v), output<4>(last.v), shape.V};
  p.states = states.mutable_data_ptr();
  const auto workspace = at::empty({kernels::gated_scan_workspace(p)}, options.dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  check_launch("gated_scan", kernels::gated_scan(p, c10::cuda::getCurrentCUDAStream()));
  return last;
}

}  // namespace girih

// Arguments of the tensor-core kernels of delta_product.
#pragma once

#include "../arguments/aligned_rows.h"
#include "../arguments/kernel_arguments.h"
#include "../arguments/shared_heads.h"
#include "delta_product/delta_product.h"

namespace girih::delta_product {

// The tensors of one call as the kernels read them: rows aligned to 16 bytes.
struct Arguments {
  Tensor q, k, v, beta, g, cu_seqlens;
  kernels::DeltaShape shape;
  int64_t D, V;  // widths without padding

  Arguments(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& beta_,
            const OptionalTensor& g_, const OptionalTensor& cu, int64_t n, const std::optional<double>& scale,
            bool l2norm_qk)
      : q(in_packs(q_)),
        k(in_packs(k_)),
        v(in_packs(v_)),
        beta(beta_),
        g(g_.value_or(Tensor())),
        D(q_.size(3)),
        V(v_.size(3)) {
    if (given(cu)) cu_seqlens = cu->contiguous();
    const auto H = v.size(2);
    shape = {kernel_tokens(q, cu_seqlens),
             static_cast<int>(H),
             static_cast<int>(std::max(q.size(2), H)),
             shared_by(k, H),
             shared_by(q, H),
             static_cast<int>(q.size(3)),
             static_cast<int>(v.size(3)),
             static_cast<int>(n),
             l2norm_qk,
             kernel_dtype(q),
             static_cast<float>(scale.value_or(1 / std::sqrt(double(D))))};
  }

  int64_t chunks() const { return kernels::piece_count(shape.tokens, kernels::delta_chunk(shape.n)); }

  Tensor rows(int64_t rows, int64_t heads, int64_t width, at::ScalarType type) const {
    return rows_for(q, rows, cu_seqlens, heads, width, type);
  }
  Tensor states() const { return at::empty({chunks(), shape.heads, shape.V, shape.D}, q.options()); }
  Tensor transitions(const std::vector<c10::SymInt>& kept) const {
    const auto all = at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(kept), q.options().dtype(at::kFloat));
    TORCH_INTERNAL_ASSERT(all.dim() == 1 || all.size(0) == kernels::delta_kept_segments(shape));
    return all;
  }

  Tensor padded(const OptionalTensor& state) const { return padded_state(state, false, shape.D, shape.V); }
  Tensor last_state() const {
    return at::empty({shape.tokens.sequences, shape.heads, shape.D, shape.V}, q.options().dtype(at::kFloat));
  }
};

}  // namespace girih::delta_product

// Arguments of the tensor-core kernels of delta_product.
#pragma once

#include "../arguments/aligned_rows.h"
#include "../arguments/kernel_arguments.h"
#include "../arguments/shared_heads.h"
#include "delta_product/delta_product.h"
#include "problem.h"

namespace girih::delta_product {

// The tensors of one call as the kernels read them: rows are aligned to 16 bytes, widths are zero-padded to
// multiples of 8.
struct Arguments {
  Tensor q, k, v, beta, g, cu_seqlens;
  kernels::DeltaShape shape;
  int64_t D, V;  // widths without padding

  // beta: the beta of the call; a beta per channel is passed with aligned rows.
  Arguments(const Call& call, const Tensor& beta)
      : q(align_rows(call.q)),
        k(align_rows(call.k)),
        v(align_rows(call.v)),
        beta(beta),
        g(call.g.value_or(Tensor())),
        cu_seqlens(contiguous_or_undefined(call.cu_seqlens)),
        D(call.q.size(3)),
        V(call.v.size(3)) {
    const auto H = v.size(2);
    shape = {sequence_layout(q, cu_seqlens),
             static_cast<int>(H),
             static_cast<int>(std::max(q.size(2), H)),
             heads_per_shared_head(k, H),
             heads_per_shared_head(q, H),
             static_cast<int>(q.size(3)),
             static_cast<int>(v.size(3)),
             static_cast<int>(call.n),
             call.l2norm_qk,
             kernel_dtype(q),
             static_cast<float>(call.query_scale())};
  }

  int64_t chunks() const {
    return kernels::token_range_count(shape.tokens, kernels::delta_chunk_tokens(shape.n));
  }

  Tensor new_rows(int64_t rows, int64_t heads, int64_t width, at::ScalarType type) const {
    return girih::new_rows(q, rows, cu_seqlens, heads, width, type);
  }
  Tensor new_states() const { return at::empty({chunks(), shape.heads, shape.V, shape.D}, q.options()); }
  Tensor transitions(const std::vector<c10::SymInt>& shape_of_saved) const {
    const auto all = new_saved(shape_of_saved, q.options().dtype(at::kFloat));
    TORCH_INTERNAL_ASSERT(all.dim() == 1 || all.size(0) == kernels::delta_saved_segments(shape));
    return all;
  }

  Tensor pad(const OptionalTensor& state) const { return pad_state(state, false, shape.D, shape.V); }
  Tensor new_state() const {
    return at::empty({shape.tokens.sequences, shape.heads, shape.D, shape.V}, q.options().dtype(at::kFloat));
  }
};

}  // namespace girih::delta_product

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

  explicit Arguments(const Call& call)
      : q(align_rows(call.q)),
        k(align_rows(call.k)),
        v(align_rows(call.v)),
        beta(convert_beta(call)),
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

  // The fields that forward and backward have in common.
  template <class Problem>
  void fill(Problem& p, const Call& call) const {
    p.shape = shape;
    p.has_channel_beta = call.has_channel_beta();
    p.q = input<4>(q), p.k = input<4>(k), p.v = input<4>(v), p.beta = input<4>(beta);
  }

  Tensor new_rows(int64_t rows, int64_t heads, int64_t width, at::ScalarType type) const {
    return girih::new_rows(q, rows, cu_seqlens, heads, width, type);
  }
  Tensor pad(const OptionalTensor& state) const { return pad_state(state, false, shape.D, shape.V); }
  Tensor new_state() const {
    return at::empty({shape.tokens.sequences, shape.heads, shape.D, shape.V}, q.options().dtype(at::kFloat));
  }

 private:
  // [B, T n, H, 1] in any dtype, or [B, T n, H, D] with aligned rows and not in fp64.
  static Tensor convert_beta(const Call& call) {
    if (!call.has_channel_beta()) return call.beta.unsqueeze(-1);
    return align_rows(call.beta.scalar_type() == at::kDouble ? call.beta.to(at::kFloat) : call.beta);
  }
};

}  // namespace girih::delta_product

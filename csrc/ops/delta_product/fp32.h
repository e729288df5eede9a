// The fp32 kernels of delta_product.
#pragma once

#include "../arguments/kernel_arguments.h"
#include "../arguments/shared_heads.h"
#include "aten.h"
#include "delta_product/delta_product.h"

namespace girih::delta_product {

// One call of the fp32 kernels, which have no shared heads: q and k are repeated to the heads of v.
class Fp32Call {
 public:
  explicit Fp32Call(const Call& call)
      : call_(call),
        q_(repeat_heads(call.q, call.v.size(2))),
        k_(repeat_heads(call.k, call.v.size(2))),
        cu_seqlens_(contiguous_or_undefined(call.cu_seqlens)),
        position_(contiguous_or_undefined(call.state_position)) {
    if (is_defined(call.g)) g_ = call.g->to(at::kFloat);
    const auto& between_chunks = call.between_chunks;
    const auto between = !between_chunks             ? kernels::Between::none
                         : *between_chunks == "gelu" ? kernels::Between::gelu
                                                     : kernels::Between::tanh;
    shape_ = {kernels::delta_segments(sequence_layout(q_, cu_seqlens_), static_cast<int>(call.n), between,
                                      call.chunk.value_or(0),
                                      position_.defined() ? position_.const_data_ptr<int64_t>() : nullptr),
              static_cast<int>(k_.size(2)),
              static_cast<int>(q_.size(2)),
              static_cast<int>(q_.size(3)),
              static_cast<int>(call.v.size(3)),
              static_cast<int>(call.n),
              static_cast<float>(call.query_scale())};
    if (is_in_place()) q_ = align_rows(q_, 4), k_ = align_rows(k_, 4);
  }

  Results forward(const Problem::SavedShapes& saved_shapes) const {
    const auto states = new_saved(saved_shapes.states, in_fp32()),
               u = new_saved(saved_shapes.prepared, in_fp32()), last = new_state(),
               o = new_rows(q_, q_.size(1), cu_seqlens_, shape_.query_heads, shape_.V, at::kFloat);
    Tensor position;
    kernels::DeltaFp32Forward p{};
    fill(p);
    p.initial = input<4>(call_.state_s);
    p.final = output<4>(last);
    p.o = output<4>(o);
    if (saved_shapes.has_saved) {
      TORCH_INTERNAL_ASSERT(states.size(0) ==
                            kernels::segment_count(shape_.segments));  // as computed by Problem::saved
      if (cu_seqlens_.defined()) u.zero_();  // rows of tokens outside of the sequences are not written
      p.u = output<4>(u);
      p.states = states.mutable_data_ptr<float>();
    }
    if (shape_.segments.between != kernels::Between::none) {
      position = at::empty({shape_.segments.tokens.sequences}, q_.options().dtype(at::kLong));
      p.position = position.mutable_data_ptr<int64_t>();
    }
    GIRIH_RUN(delta_fp32_forward, p, q_);
    return {o.to(q_.scalar_type()),
            last,
            position.defined() ? OptionalTensor(position) : std::nullopt,
            states,
            u,
            new_saved(saved_shapes.transitions, in_fp32())};
  }

  Gradients backward(const OutputGradients& grads, const SavedTensors& saved) const {
    const auto dout = align_output_gradient(grads.o, q_, shape_.query_heads, shape_.V, at::kFloat, 4),
               dinitial = new_state();
    const auto empty_with_sizes = [](const Tensor& x) { return at::empty(x.sizes(), x.options()); };
    const auto dq = is_in_place() ? new_rows(q_, q_.size(1), cu_seqlens_, q_.size(2), q_.size(3), at::kFloat)
                                  : empty_with_sizes(q_),
               dk = empty_with_sizes(k_), dv = empty_with_sizes(call_.v),
               dbeta = empty_with_sizes(call_.beta);
    const auto dg =
        g_.defined() ? at::zeros({kernels::delta_gate_slabs(shape_.D), q_.size(0), q_.size(1), shape_.heads},
                                 in_fp32())
                     : Tensor();
    kernels::DeltaFp32Backward p{};
    fill(p);
    p.has_channel_beta = call_.has_channel_beta();
    p.dout = input<4>(dout);
    p.dfinal = input<4>(grads.s);
    p.states = saved.states.const_data_ptr<float>(), p.u = input<4>(saved.prepared);
    p.dinitial = output<4>(dinitial);
    p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv),
    p.dbeta = output<4>(with_channels(dbeta));
    p.dg = dg.defined() ? dg.mutable_data_ptr<float>() : nullptr;
    GIRIH_RUN(delta_fp32_backward, p, q_);
    return {sum_shared_heads(dq, call_.q),
            sum_shared_heads(dk, call_.k),
            dv,
            dbeta,
            g_.defined() ? OptionalTensor(dg.sum(0).to(call_.g->scalar_type())) : std::nullopt,
            if_defined(call_.state_s, [&] { return dinitial; }),
            std::nullopt,
            std::nullopt};
  }

 private:
  // The fields that forward and backward have in common.
  template <class Problem>
  void fill(Problem& p) const {
    p.shape = shape_;
    p.unit = call_.l2norm_qk;
    p.q = input<4>(q_), p.k = input<4>(k_), p.v = input<4>(call_.v);
    p.beta = input<4>(with_channels(call_.beta));
    p.g = input<3>(g_);
  }
  bool is_in_place() const {
    return kernels::delta_fp32_is_in_place(kernel_dtype(q_), call_.l2norm_qk, shape_.D);
  }
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }
  Tensor new_state() const {
    return at::empty({shape_.segments.tokens.sequences, shape_.heads, shape_.D, shape_.V}, in_fp32());
  }
  // beta [.., H] of a step has one value for all channels: [.., H, 1].
  static Tensor with_channels(const Tensor& beta) { return beta.dim() == 4 ? beta : beta.unsqueeze(-1); }

  const Call& call_;
  Tensor q_, k_, cu_seqlens_, position_, g_;
  kernels::DeltaFp32Shape shape_;
};

}  // namespace girih::delta_product

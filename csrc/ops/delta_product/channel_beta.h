// delta_product with one beta per channel, on the tensor cores.
#pragma once

#include "delta_product/channel_beta.h"
#include "tensor_cores.h"

namespace girih::delta_product {

// The tensors of one call, and b and w. Backward computes b and w again.
class ChannelBetaCall {
 public:
  explicit ChannelBetaCall(const Call& call)
      : call_(call),
        a_(call, align_rows(call.beta.scalar_type() == at::kDouble ? call.beta.to(at::kFloat) : call.beta)),
        b_(allocate_rows(a_.v.scalar_type())),
        w_(allocate_rows(a_.v.scalar_type())) {
    kernels::DeltaChannelBetaRows p;
    p.shape = a_.shape;
    p.k = input<4>(a_.k), p.v = input<4>(a_.v), p.beta = input<4>(a_.beta);
    p.b = output<4>(b_), p.w = output<4>(w_);
    GIRIH_LAUNCH(delta_channel_beta_rows, p);
  }

  Results forward(const Problem::SavedShapes& saved_shapes) const {
    return run_forward(a_, w_, b_, call_.state_s, saved_shapes);
  }

  Gradients backward(const OutputGradients& grads, const SavedTensors& saved) const {
    const auto &q = call_.q, &k = call_.k;  // their heads may be shared
    const auto& shape = a_.shape;
    const auto type = q.scalar_type();
    const auto dw = allocate_rows(type);
    const auto reverse_result = run_reverse(a_, b_, grads, saved, dw, false);
    const auto& reverse = reverse_result.p;

    const auto dq = a_.new_rows(q.size(1), shape.output_heads, shape.D, type), dk = allocate_rows(type),
               db = allocate_rows(type);
    kernels::DeltaChannelBetaGradients p;
    p.shape = shape;
    p.q = reverse.q, p.k = reverse.k, p.b = reverse.b, p.w = input<4>(w_), p.dout = reverse.dout;
    p.dz = input<4>(dw);
    p.prepared = reverse.prepared;
    p.states = saved.states.const_data_ptr();
    p.gradients = reverse.gradients;
    p.dq = output<4>(dq), p.dk = output<4>(dk), p.db = output<4>(db);
    GIRIH_LAUNCH(delta_channel_beta_gradients, p);

    const auto dv = allocate_rows(type), dbeta = allocate_rows(a_.beta.scalar_type());
    kernels::DeltaChannelBetaRowGradients r;
    r.shape = shape;
    r.k = p.k, r.v = input<4>(a_.v), r.beta = input<4>(a_.beta);
    r.db = input<4>(db), r.dw = p.dz;
    r.dk = p.dk, r.dv = output<4>(dv), r.dbeta = output<4>(dbeta);
    GIRIH_LAUNCH(delta_channel_beta_row_gradients, r);

    return {sum_head_groups(dq, q.size(2), a_.D, q),
            sum_head_groups(dk, k.size(2), a_.D, k),
            crop_width(dv, a_.V),
            crop_width(dbeta, a_.D).to(call_.beta.scalar_type()),
            std::nullopt,
            if_defined(call_.state_s, [&] { return crop_state(reverse_result.dinitial, a_.D, a_.V); }),
            std::nullopt,
            std::nullopt};
  }

 private:
  Tensor allocate_rows(at::ScalarType type) const {
    return a_.new_rows(call_.k.size(1), a_.shape.heads, a_.shape.V, type);
  }

  const Call& call_;
  Arguments a_;
  Tensor b_, w_;
};

}  // namespace girih::delta_product

// The fp32 kernels of delta_product.
#pragma once

#include "../arguments/kernel_arguments.h"
#include "../arguments/shared_heads.h"
#include "aten.h"
#include "delta_product/fp32.h"

namespace girih::delta_product {

// One call of the fp32 kernels, which have no shared heads: q and k are repeated to the heads of v.
class Fp32Call {
 public:
  explicit Fp32Call(const Call& call)
      : call_(call),
        q_(repeat_heads(call.q, call.v.size(2))),
        k_(repeat_heads(call.k, call.v.size(2))),
        v_(call.v),
        beta_(call.beta),
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
              static_cast<int>(v_.size(3)),
              static_cast<int>(call.n),
              static_cast<float>(call.query_scale())};
  }

  Results forward(const Problem::SavedShapes& saved_shapes) const {
    const auto rows = make_rows(true);
    const auto states = new_saved(saved_shapes.states, in_fp32()),
               u = new_saved(saved_shapes.prepared, in_fp32()), last = new_state();
    const auto o = new_rows(q_, q_.size(1), cu_seqlens_, shape_.query_heads, shape_.V, at::kFloat);
    Tensor position;
    auto p = scan(rows, rows.w, call_.state_s.value_or(Tensor()), last);
    p.o = output<4>(o);
    if (saved_shapes.has_saved) {
      TORCH_INTERNAL_ASSERT(states.size(0) ==
                            kernels::segment_count(shape_.segments));  // as computed by Problem::saved
      if (cu_seqlens_.defined()) u.zero_();  // rows of tokens outside of the sequences are not written
      p.u = output<4>(u);
      p.saved_states = states.mutable_data_ptr<float>();
    }
    if (shape_.segments.between != kernels::Between::none) {
      position = at::empty({shape_.segments.tokens.sequences}, q_.options().dtype(at::kLong));
      p.position = position.mutable_data_ptr<int64_t>();
    }
    launch_scan(p);
    return {o.to(q_.scalar_type()),
            last,
            position.defined() ? OptionalTensor(position) : std::nullopt,
            states,
            u,
            new_saved(saved_shapes.transitions, in_fp32())};
  }

  Gradients backward(const OutputGradients& grads, const SavedTensors& saved) const {
    const auto &states = saved.states, &u = saved.prepared;
    const auto rows = make_rows(false);
    const auto dout = align_output_gradient(grads.o, q_, shape_.query_heads, shape_.V, at::kFloat, 4);
    const auto du = rows_like(v_), gradients = at::empty_like(states), dinitial = new_state();
    auto reverse = scan(rows, dout, grads.s.value_or(Tensor()), dinitial);
    reverse.reverse = true;
    reverse.u = output<4>(du);
    reverse.states = states.const_data_ptr<float>();
    reverse.saved_states = gradients.mutable_data_ptr<float>();
    launch_scan(reverse);

    const auto dunit_q = rows_like(q_), dunit_k = rows_like(k_), db = rows_like(k_);
    const auto slabs = (shape_.D + 63) / 64;
    const auto dg =
        g_.defined() ? at::zeros({slabs, q_.size(0), q_.size(1), shape_.heads}, in_fp32()) : Tensor();
    kernels::DeltaFp32Gradients p;
    p.shape = shape_;
    p.q = input<4>(rows.q), p.k = input<4>(rows.k), p.b = input<4>(rows.b), p.dout = input<4>(dout);
    p.u = input<4>(u), p.du = input<4>(du);
    p.g = input<3>(g_);
    p.states = states.const_data_ptr<float>(), p.gradients = gradients.const_data_ptr<float>();
    p.dq = output<4>(dunit_q), p.dk = output<4>(dunit_k), p.db = output<4>(db);
    p.dg = dg.defined() ? dg.mutable_data_ptr<float>() : nullptr;
    GIRIH_LAUNCH(delta_fp32_gradients, p);

    const auto empty_with_sizes = [](const Tensor& x) { return at::empty(x.sizes(), x.options()); };
    const bool reuses_dunit =
        !call_.l2norm_qk && q_.scalar_type() == at::kFloat && q_.size(3) % 4 == 0;  // then dunit_q is dq
    const auto dq = reuses_dunit ? dunit_q : empty_with_sizes(q_), dk = empty_with_sizes(k_),
               dv = empty_with_sizes(v_), dbeta = empty_with_sizes(beta_);
    kernels::DeltaFp32RowGradients r;
    r.shape = shape_;
    r.unit = call_.l2norm_qk;
    r.q = input<4>(q_), r.k = input<4>(k_), r.v = input<4>(v_), r.beta = expand_beta(beta_);
    r.dunit_q = input<4>(dunit_q), r.dunit_k = input<4>(dunit_k), r.db = input<4>(db), r.dw = input<4>(du);
    if (!reuses_dunit) r.dq = output<4>(dq);
    r.dk = output<4>(dk), r.dv = output<4>(dv);
    r.has_channel_beta = call_.has_channel_beta();
    r.dbeta = output<4>(r.has_channel_beta ? dbeta : dbeta.unsqueeze(-1));
    GIRIH_LAUNCH(delta_fp32_row_gradients, r);
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
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }

  // fp32 rows with the sizes of x. Rows of tokens outside of the sequences are zero.
  Tensor rows_like(const Tensor& x) const {
    return new_rows(q_, x.size(1), cu_seqlens_, x.size(2), kernels::round_up_to_4(x.size(3)), at::kFloat);
  }
  Tensor new_state() const {
    return at::empty({shape_.segments.tokens.sequences, shape_.heads, shape_.D, shape_.V}, in_fp32());
  }
  // beta [.., H] of a step has one value for all channels.
  static kernels::InputTensor<4> expand_beta(const Tensor& beta) {
    return input<4>(beta.dim() == 4 ? beta : beta.unsqueeze(-1));
  }

  // b and, in forward, w. q and k are normalised, or converted to fp32.
  struct Rows {
    Tensor q, k, b, w;
  };
  Rows make_rows(bool needs_w) const {
    kernels::DeltaFp32Rows p;
    p.shape = shape_;
    p.unit = call_.l2norm_qk;
    p.q = input<4>(q_), p.k = input<4>(k_), p.v = input<4>(v_), p.beta = expand_beta(beta_);
    const auto allocate = [&](const Tensor& x, kernels::OutputTensor<4>& to) {
      const auto rows =
          at::empty({x.size(0), x.size(1), x.size(2), kernels::round_up_to_4(x.size(3))}, in_fp32());
      to = output<4>(rows);
      return rows;
    };
    const auto normalise_or_convert = [&](const Tensor& x, kernels::OutputTensor<4>& to) {
      return call_.l2norm_qk || x.scalar_type() != at::kFloat ? allocate(x, to) : align_rows(x, 4);
    };
    const Rows rows{normalise_or_convert(q_, p.unit_q), normalise_or_convert(k_, p.unit_k), allocate(k_, p.b),
                    needs_w ? allocate(v_, p.w) : Tensor()};
    GIRIH_LAUNCH(delta_fp32_rows, p);
    return rows;
  }

  kernels::DeltaFp32Scan scan(const Rows& rows, const Tensor& value, const Tensor& initial,
                              const Tensor& last) const {
    kernels::DeltaFp32Scan p{};
    p.shape = shape_;
    p.q = input<4>(rows.q), p.k = input<4>(rows.k), p.b = input<4>(rows.b), p.value = input<4>(value);
    p.g = input<3>(g_);
    p.initial = input<4>(initial);
    p.final = output<4>(last);
    return p;
  }
  static void launch_scan(const kernels::DeltaFp32Scan& p) { GIRIH_LAUNCH(delta_fp32_scan, p); }

  const Call& call_;
  Tensor q_, k_, v_, beta_, cu_seqlens_, position_, g_;
  kernels::DeltaFp32Shape shape_;
};

}  // namespace girih::delta_product

// delta_product with a beta for every channel, on the tensor cores.
#pragma once

#include "arguments.h"
#include "aten.h"
#include "delta_product/vector.h"
#include "problem.h"

namespace girih::delta_product {

// One call's tensors, and b and w of them, which backward makes again.
class VectorCall {
 public:
  VectorCall(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& cu,
             int64_t n, const std::optional<double>& scale)
      : a_(q, k, v, in_packs(beta.scalar_type() == at::kDouble ? beta.to(at::kFloat) : beta), std::nullopt,
           cu, n, scale, false),
        beta_type_(beta.scalar_type()),
        rows_(k.size(1)),
        b_(like_rows(a_.v.scalar_type())),
        w_(like_rows(a_.v.scalar_type())) {
    kernels::DeltaVectorRows p;
    p.shape = a_.shape;
    p.k = input<4>(a_.k), p.v = input<4>(a_.v), p.beta = input<4>(a_.beta);
    p.b = output<4>(b_), p.w = output<4>(w_);
    check_launch("delta_vector_rows", kernels::delta_vector_rows(p, c10::cuda::getCurrentCUDAStream()));
  }

  Results forward(const OptionalTensor& initial, const Problem::Saved& kept, bool save) const {
    const auto prepared = at::empty({a_.chunks(), a_.shape.heads, kernels::kDeltaPreparedBytes},
                                    a_.q.options().dtype(at::kByte));
    const auto stream = c10::cuda::getCurrentCUDAStream();
    kernels::DeltaPrepare prepare;
    prepare.shape = a_.shape;
    prepare.k = input<4>(a_.k), prepare.b = input<4>(b_);
    prepare.prepared = prepared.mutable_data_ptr();
    check_launch("delta_prepare", kernels::delta_prepare(prepare, stream));

    const auto first = a_.padded(initial), last = a_.last_state(),
               states = save ? a_.states() : at::empty({0}, a_.q.options()),
               transitions = a_.transitions(kept.transitions),
               o = a_.rows(a_.q.size(1), a_.shape.query_heads, a_.shape.V, a_.q.scalar_type());
    kernels::DeltaScan p;
    p.shape = a_.shape;
    p.q = input<4>(a_.q), p.k = input<4>(a_.k), p.v = input<4>(w_), p.b = input<4>(b_);
    p.gated = false;
    p.prepared = prepared.const_data_ptr();
    p.initial = input<4>(first);
    p.final = output<4>(last);
    p.o = output<4>(o);
    p.states = save ? states.mutable_data_ptr() : nullptr;
    p.transitions = transitions.numel() > 0 ? transitions.mutable_data_ptr<float>() : nullptr;
    const auto workspace = at::empty({kernels::delta_scan_workspace(p)}, prepared.options());
    p.workspace = workspace.mutable_data_ptr();
    check_launch("delta_scan", kernels::delta_scan(p, stream));
    return {without_packs(o, a_.V),
            cut(last, a_.D, a_.V),
            std::nullopt,
            states,
            save ? prepared : at::empty({0}, prepared.options()),
            transitions};
  }

  // q, k: the inputs, of whose heads the gradients are.
  Gradients backward(const Tensor& q, const Tensor& k, const OptionalTensor& grad_o,
                     const OptionalTensor& grad_s, const OptionalTensor& state, const Tensor& states,
                     const Tensor& prepared, const Tensor& transitions) const {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const auto& shape = a_.shape;
    const auto type = q.scalar_type();
    const auto T = q.size(1);
    const int64_t HO = shape.query_heads;
    const auto dout = given(grad_o) ? in_packs(grad_o->to(type)) : a_.rows(T, HO, shape.V, type).zero_();
    const auto factors = at::empty({a_.chunks(), HO, kernels::kDeltaRows}, q.options().dtype(at::kFloat));
    const auto dw = like_rows(type), gradients = a_.states(), first = a_.last_state(),
               last = a_.padded(grad_s);
    kernels::DeltaReverse reverse;
    reverse.shape = shape;
    reverse.q = input<4>(a_.q), reverse.k = input<4>(a_.k), reverse.b = input<4>(b_);
    reverse.dout = input<4>(dout);
    reverse.gated = false;
    reverse.prepared = prepared.const_data_ptr();
    reverse.transitions = transitions.const_data_ptr<float>();
    reverse.factors = factors.mutable_data_ptr<float>();
    reverse.initial = input<4>(last);
    reverse.final = output<4>(first);
    reverse.dz = output<4>(dw);
    reverse.in_place = false;
    reverse.gradients = gradients.mutable_data_ptr();
    {
      const auto workspace = at::empty({kernels::delta_reverse_workspace(reverse)}, prepared.options());
      reverse.workspace = workspace.mutable_data_ptr();
      check_launch("delta_reverse", kernels::delta_reverse(reverse, stream));
    }

    const auto dq = a_.rows(T, HO, shape.D, type), dk = like_rows(type), db = like_rows(type);
    kernels::DeltaVectorGradients p;
    p.shape = shape;
    p.q = reverse.q, p.k = reverse.k, p.b = reverse.b, p.w = input<4>(w_), p.dout = reverse.dout;
    p.dz = input<4>(dw);
    p.prepared = reverse.prepared;
    p.states = states.const_data_ptr();
    p.gradients = gradients.const_data_ptr();
    p.dq = output<4>(dq), p.dk = output<4>(dk), p.db = output<4>(db);
    check_launch("delta_vector_gradients", kernels::delta_vector_gradients(p, stream));

    const auto dv = like_rows(type), dbeta = like_rows(a_.beta.scalar_type());
    kernels::DeltaVectorRowGradients r;
    r.shape = shape;
    r.k = p.k, r.v = input<4>(a_.v), r.beta = input<4>(a_.beta);
    r.db = input<4>(db), r.dw = p.dz;
    r.dk = p.dk, r.dv = output<4>(dv), r.dbeta = output<4>(dbeta);
    check_launch("delta_vector_row_gradients", kernels::delta_vector_row_gradients(r, stream));

    return {gathered(dq, q.size(2), a_.D, q),
            gathered(dk, k.size(2), a_.D, k),
            without_packs(dv, a_.V),
            without_packs(dbeta, a_.D).to(beta_type_),
            std::nullopt,
            if_given(state, [&] { return cut(first, a_.D, a_.V); }),
            std::nullopt,
            std::nullopt};
  }

 private:
  Tensor like_rows(at::ScalarType type) const { return a_.rows(rows_, a_.shape.heads, a_.shape.V, type); }

  Arguments a_;
  at::ScalarType beta_type_;
  int64_t rows_;
  Tensor b_, w_;
};

}  // namespace girih::delta_product

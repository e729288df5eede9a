// delta_product with one beta per channel, on the tensor cores.
#pragma once

#include "delta_product/vector.h"
#include "tensor_cores.h"

namespace girih::delta_product {

// The tensors of one call, and b and w. Backward computes b and w again.
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

  Results forward(const OptionalTensor& initial, const Problem::Saved& kept) const {
    return run_forward(a_, w_, b_, initial, kept);
  }

  // q, k: the inputs, whose heads may be shared.
  Gradients backward(const Tensor& q, const Tensor& k, const OptionalTensor& grad_o,
                     const OptionalTensor& grad_s, const OptionalTensor& state, const Tensor& states,
                     const Tensor& prepared, const Tensor& transitions) const {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const auto& shape = a_.shape;
    const auto type = q.scalar_type();
    const auto dw = like_rows(type);
    const auto reversed = run_reverse(a_, b_, grad_o, grad_s, prepared, transitions, dw, false);
    const auto& reverse = reversed.p;

    const auto dq = a_.rows(q.size(1), shape.query_heads, shape.D, type), dk = like_rows(type),
               db = like_rows(type);
    kernels::DeltaVectorGradients p;
    p.shape = shape;
    p.q = reverse.q, p.k = reverse.k, p.b = reverse.b, p.w = input<4>(w_), p.dout = reverse.dout;
    p.dz = input<4>(dw);
    p.prepared = reverse.prepared;
    p.states = states.const_data_ptr();
    p.gradients = reverse.gradients;
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
            if_given(state, [&] { return cut(reversed.first, a_.D, a_.V); }),
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

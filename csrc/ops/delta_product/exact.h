// The fp32 kernels of delta_product.
#pragma once

#include "../arguments/kernel_arguments.h"
#include "aten.h"
#include "delta_product/exact.h"
#include "problem.h"

namespace girih::delta_product {

// One call of the fp32 kernels.
class ExactCall {
 public:
  ExactCall(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const OptionalTensor& g,
            const OptionalTensor& position, const OptionalTensor& cu, int64_t n,
            const std::optional<double>& scale, bool unit, std::optional<int64_t> chunk,
            const Between& between_chunks)
      : q_(q), k_(k), v_(v), beta_(beta), unit_(unit) {
    if (given(cu)) cu_seqlens_ = cu->contiguous();
    if (given(position)) position_ = position->contiguous();
    if (given(g)) g_ = g->to(at::kFloat), g_type_ = g->scalar_type();
    const auto between = !between_chunks             ? kernels::Between::none
                         : *between_chunks == "gelu" ? kernels::Between::gelu
                                                     : kernels::Between::tanh;
    shape_ = {
        kernels::delta_pieces(kernel_tokens(q, cu_seqlens_), static_cast<int>(n), between, chunk.value_or(0),
                              position_.defined() ? position_.const_data_ptr<int64_t>() : nullptr),
        static_cast<int>(k.size(2)),
        static_cast<int>(q.size(2)),
        static_cast<int>(q.size(3)),
        static_cast<int>(v.size(3)),
        static_cast<int>(n),
        static_cast<float>(scale.value_or(1 / std::sqrt(double(q.size(3)))))};
  }

  Results forward(const OptionalTensor& initial, const Problem::Saved& kept) const {
    const auto rows = make_rows(true);
    const auto states = new_kept(kept.states), u = new_kept(kept.prepared), last = new_state();
    const auto o = rows_for(q_, q_.size(1), cu_seqlens_, shape_.query_heads, shape_.V, at::kFloat);
    Tensor position;
    auto p = scan(rows, rows.w, initial.value_or(Tensor()), last);
    p.o = output<4>(o);
    if (kept.any) {
      TORCH_INTERNAL_ASSERT(states.size(0) ==
                            kernels::piece_count(shape_.pieces));  // as computed by Problem::saved
      if (cu_seqlens_.defined()) u.zero_();  // rows of tokens outside of the sequences are not written
      p.u = output<4>(u);
      p.published = states.mutable_data_ptr<float>();
    }
    if (shape_.pieces.between != kernels::Between::none) {
      position = at::empty({shape_.pieces.tokens.sequences}, q_.options().dtype(at::kLong));
      p.position = position.mutable_data_ptr<int64_t>();
    }
    launch_scan(p);
    return {o.to(q_.scalar_type()),
            last,
            position.defined() ? OptionalTensor(position) : std::nullopt,
            states,
            u,
            new_kept(kept.transitions)};
  }

  Gradients backward(const OptionalTensor& grad_o, const OptionalTensor& grad_s, const OptionalTensor& state,
                     const Tensor& states, const Tensor& u) const {
    const auto rows = make_rows(false);
    const auto dout =
        given(grad_o)
            ? in_packs(grad_o->to(at::kFloat), 4)
            : at::zeros({q_.size(0), q_.size(1), shape_.query_heads, kernels::in_fours<int64_t>(shape_.V)},
                        in_fp32());
    const auto du = rows_like(v_), gradients = at::empty_like(states), first = new_state();
    auto reverse = scan(rows, dout, grad_s.value_or(Tensor()), first);
    reverse.reverse = true;
    reverse.u = output<4>(du);
    reverse.states = states.const_data_ptr<float>();
    reverse.published = gradients.mutable_data_ptr<float>();
    launch_scan(reverse);

    const auto dunit_q = rows_like(q_), dunit_k = rows_like(k_), db = rows_like(k_);
    const auto slabs = (shape_.D + 63) / 64;
    const auto dg =
        g_.defined() ? at::zeros({slabs, q_.size(0), q_.size(1), shape_.heads}, in_fp32()) : Tensor();
    kernels::DeltaExactGradients p;
    p.shape = shape_;
    p.q = input<4>(rows.q), p.k = input<4>(rows.k), p.b = input<4>(rows.b), p.dout = input<4>(dout);
    p.u = input<4>(u), p.du = input<4>(du);
    p.g = input<3>(g_);
    p.states = states.const_data_ptr<float>(), p.gradients = gradients.const_data_ptr<float>();
    p.dq = output<4>(dunit_q), p.dk = output<4>(dunit_k), p.db = output<4>(db);
    p.dg = dg.defined() ? dg.mutable_data_ptr<float>() : nullptr;
    check_launch("delta_exact_gradients",
                 kernels::delta_exact_gradients(p, c10::cuda::getCurrentCUDAStream()));

    const auto like = [](const Tensor& x) { return at::empty(x.sizes(), x.options()); };
    const bool same = !unit_ && q_.scalar_type() == at::kFloat && q_.size(3) % 4 == 0;  // then dunit_q is dq
    const auto dq = same ? dunit_q : like(q_), dk = like(k_), dv = like(v_), dbeta = like(beta_);
    kernels::DeltaExactRowGradients r;
    r.shape = shape_;
    r.unit = unit_;
    r.q = input<4>(q_), r.k = input<4>(k_), r.v = input<4>(v_), r.beta = by_channel(beta_);
    r.dunit_q = input<4>(dunit_q), r.dunit_k = input<4>(dunit_k), r.db = input<4>(db), r.dw = input<4>(du);
    if (!same) r.dq = output<4>(dq);
    r.dk = output<4>(dk), r.dv = output<4>(dv);
    r.vector = beta_.dim() == 4;
    r.dbeta = output<4>(r.vector ? dbeta : dbeta.unsqueeze(-1));
    check_launch("delta_exact_row_gradients",
                 kernels::delta_exact_row_gradients(r, c10::cuda::getCurrentCUDAStream()));
    return {dq,
            dk,
            dv,
            dbeta,
            g_.defined() ? OptionalTensor(dg.sum(0).to(g_type_)) : std::nullopt,
            if_given(state, [&] { return first; }),
            std::nullopt,
            std::nullopt};
  }

 private:
  at::TensorOptions in_fp32() const { return q_.options().dtype(at::kFloat); }

  // fp32 rows with the sizes of x. Rows of tokens outside of the sequences are zero.
  Tensor rows_like(const Tensor& x) const {
    return rows_for(q_, x.size(1), cu_seqlens_, x.size(2), kernels::in_fours(x.size(3)), at::kFloat);
  }
  Tensor new_kept(const std::vector<c10::SymInt>& sizes) const {
    return at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(sizes), in_fp32());
  }
  Tensor new_state() const {
    return at::empty({shape_.pieces.tokens.sequences, shape_.heads, shape_.D, shape_.V}, in_fp32());
  }
  // beta [.., H] of a step has one value for all channels.
  static kernels::In<4> by_channel(const Tensor& beta) {
    return input<4>(beta.dim() == 4 ? beta : beta.unsqueeze(-1));
  }

  // b and, in forward, w. q and k are normalised, or converted to fp32.
  struct Rows {
    Tensor q, k, b, w;
  };
  Rows make_rows(bool with_w) const {
    kernels::DeltaExactRows p;
    p.shape = shape_;
    p.unit = unit_;
    p.q = input<4>(q_), p.k = input<4>(k_), p.v = input<4>(v_), p.beta = by_channel(beta_);
    const auto made = [&](const Tensor& x, kernels::Out<4>& to) {
      const auto rows = at::empty({x.size(0), x.size(1), x.size(2), kernels::in_fours(x.size(3))}, in_fp32());
      to = output<4>(rows);
      return rows;
    };
    const auto unit = [&](const Tensor& x, kernels::Out<4>& to) {
      return unit_ || x.scalar_type() != at::kFloat ? made(x, to) : in_packs(x, 4);
    };
    const Rows rows{unit(q_, p.unit_q), unit(k_, p.unit_k), made(k_, p.b), with_w ? made(v_, p.w) : Tensor()};
    check_launch("delta_exact_rows", kernels::delta_exact_rows(p, c10::cuda::getCurrentCUDAStream()));
    return rows;
  }

  kernels::DeltaExactScan scan(const Rows& rows, const Tensor& value, const Tensor& initial,
                               const Tensor& last) const {
    kernels::DeltaExactScan p{};
    p.shape = shape_;
    p.q = input<4>(rows.q), p.k = input<4>(rows.k), p.b = input<4>(rows.b), p.value = input<4>(value);
    p.g = input<3>(g_);
    p.initial = input<4>(initial);
    p.final = output<4>(last);
    return p;
  }
  static void launch_scan(const kernels::DeltaExactScan& p) {
    check_launch("delta_exact_scan", kernels::delta_exact_scan(p, c10::cuda::getCurrentCUDAStream()));
  }

  Tensor q_, k_, v_, beta_, g_, cu_seqlens_, position_;
  at::ScalarType g_type_ = at::kFloat;
  bool unit_;
  kernels::DeltaExactShape shape_;
};

}  // namespace girih::delta_product

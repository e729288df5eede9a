// Shared by the tensor-core kernels with one beta per step and with one beta per channel (vector.h): prepare,
// scan, reverse.
#pragma once

#include "arguments.h"
#include "aten.h"
#include "problem.h"

namespace girih::delta_product {

// Allocates the workspace of a launch.
inline Tensor workspace_of(const Arguments& a, int64_t bytes) {
  return at::empty({bytes}, a.q.options().dtype(at::kByte));
}

// v: the argument v, or w. b: the keys of the reads, if they differ from k (one beta per channel); else
// undefined.
inline Results run_forward(const Arguments& a, const Tensor& v, const Tensor& b, const OptionalTensor& state,
                           const Problem::Saved& kept) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto prepared = workspace_of(a, a.chunks() * a.shape.heads * kernels::kDeltaPreparedBytes)
                            .view({a.chunks(), a.shape.heads, kernels::kDeltaPreparedBytes});
  kernels::DeltaPrepare prepare;
  prepare.shape = a.shape;
  prepare.k = input<4>(a.k), prepare.g = input<3>(a.g);
  if (b.defined()) {
    prepare.b = input<4>(b);
  } else {
    prepare.beta = input<3>(a.beta);
  }
  prepare.prepared = prepared.mutable_data_ptr();
  check_launch("delta_prepare", kernels::delta_prepare(prepare, stream));

  const auto initial = a.padded(state), last = a.last_state(),
             states = kept.any ? a.states() : at::empty({0}, a.q.options()),
             transitions = a.transitions(kept.transitions),
             o = a.rows(a.q.size(1), a.shape.query_heads, a.shape.V, a.q.scalar_type());
  kernels::DeltaScan p;
  p.shape = a.shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(v), p.b = input<4>(b);
  p.gated = a.g.defined();
  p.prepared = prepared.const_data_ptr();
  p.initial = input<4>(initial);
  p.final = output<4>(last);
  p.o = output<4>(o);
  p.states = kept.any ? states.mutable_data_ptr() : nullptr;
  p.transitions = transitions.numel() > 0 ? transitions.mutable_data_ptr<float>() : nullptr;
  const auto workspace = workspace_of(a, kernels::delta_scan_workspace(p));
  p.workspace = workspace.mutable_data_ptr();
  check_launch("delta_scan", kernels::delta_scan(p, stream));
  return {without_packs(o, a.V),
          cut(last, a.D, a.V),
          std::nullopt,
          states,
          kept.any ? prepared : at::empty({0}, prepared.options()),
          transitions};
}

// The results of delta_reverse, which the gradient kernels read.
struct Reversed {
  Tensor dout, factors, gradients, first, last;
  kernels::DeltaReverse p;
};

// dz: the output for G, or for dv if `in_place`.
inline Reversed run_reverse(const Arguments& a, const Tensor& b, const OptionalTensor& grad_o,
                            const OptionalTensor& grad_s, const Tensor& prepared, const Tensor& transitions,
                            const Tensor& dz, bool in_place) {
  const auto& shape = a.shape;
  const auto type = a.q.scalar_type();
  Reversed r;
  r.dout = given(grad_o) ? in_packs(grad_o->to(type))
                         : a.rows(a.q.size(1), shape.query_heads, shape.V, type).zero_();
  r.factors =
      at::empty({a.chunks(), shape.query_heads, kernels::kDeltaRows}, a.q.options().dtype(at::kFloat));
  r.gradients = a.states(), r.first = a.last_state(), r.last = a.padded(grad_s);
  auto& p = r.p;
  p.shape = shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.b = input<4>(b);
  p.dout = input<4>(r.dout);
  p.gated = a.g.defined();
  p.prepared = prepared.const_data_ptr();
  p.transitions = transitions.const_data_ptr<float>();
  p.factors = r.factors.mutable_data_ptr<float>();
  p.initial = input<4>(r.last);
  p.final = output<4>(r.first);
  p.dz = output<4>(dz);
  p.in_place = in_place;
  p.gradients = r.gradients.mutable_data_ptr();
  const auto workspace = workspace_of(a, kernels::delta_reverse_workspace(p));
  p.workspace = workspace.mutable_data_ptr();
  check_launch("delta_reverse", kernels::delta_reverse(p, c10::cuda::getCurrentCUDAStream()));
  return r;
}

}  // namespace girih::delta_product

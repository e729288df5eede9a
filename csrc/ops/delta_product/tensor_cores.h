// Shared by the tensor-core kernels with one beta per step and with one beta per channel (channel_beta.h):
// prepare, scan, reverse.
#pragma once

#include "arguments.h"
#include "aten.h"

namespace girih::delta_product {

// Allocates the workspace of a launch.
inline Tensor new_workspace(const Arguments& a, int64_t bytes) {
  return at::empty({bytes}, a.q.options().dtype(at::kByte));
}

// v: the argument v, or w. b: the keys of the reads, if they differ from k (one beta per channel); else
// undefined.
inline Results run_forward(const Arguments& a, const Tensor& v, const Tensor& b, const OptionalTensor& state,
                           const Problem::SavedShapes& saved_shapes) {
  const auto prepared = new_workspace(a, a.chunks() * a.shape.heads * kernels::kDeltaPreparedBytes)
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
  GIRIH_LAUNCH(delta_prepare, prepare);

  const auto initial = a.pad(state), last = a.new_state(),
             states = saved_shapes.has_saved ? a.new_states() : at::empty({0}, a.q.options()),
             transitions = a.transitions(saved_shapes.transitions),
             o = a.new_rows(a.q.size(1), a.shape.output_heads, a.shape.V, a.q.scalar_type());
  kernels::DeltaScan p;
  p.shape = a.shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(v), p.b = input<4>(b);
  p.gated = a.g.defined();
  p.prepared = prepared.const_data_ptr();
  p.initial = input<4>(initial);
  p.final = output<4>(last);
  p.o = output<4>(o);
  p.states = saved_shapes.has_saved ? states.mutable_data_ptr() : nullptr;
  p.transitions = transitions.numel() > 0 ? transitions.mutable_data_ptr<float>() : nullptr;
  const auto workspace = new_workspace(a, kernels::delta_scan_workspace(p));
  p.workspace = workspace.mutable_data_ptr();
  GIRIH_LAUNCH(delta_scan, p);
  return {crop_width(o, a.V),
          crop_state(last, a.D, a.V),
          std::nullopt,
          states,
          saved_shapes.has_saved ? prepared : at::empty({0}, prepared.options()),
          transitions};
}

// The results of delta_reverse, which the gradient kernels read, and the tensors that `p` refers to.
struct ReverseResult {
  Tensor dout, factors, gradients, dinitial, dfinal;
  kernels::DeltaReverse p;
};

// dz: the output for G. If `dz_is_dv`, dz and dv are one tensor, and reverse may store dv in it.
inline ReverseResult run_reverse(const Arguments& a, const Tensor& b, const OutputGradients& grads,
                                 const SavedTensors& saved, const Tensor& dz, bool dz_is_dv) {
  const auto& shape = a.shape;
  ReverseResult r;
  r.dout = align_output_gradient(grads.o, a.q, shape.output_heads, shape.V, a.q.scalar_type());
  r.factors =
      at::empty({a.chunks(), shape.output_heads, kernels::kDeltaChunkRows}, a.q.options().dtype(at::kFloat));
  r.gradients = a.new_states(), r.dinitial = a.new_state(), r.dfinal = a.pad(grads.s);
  auto& p = r.p;
  p.shape = shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.b = input<4>(b);
  p.dout = input<4>(r.dout);
  p.gated = a.g.defined();
  p.prepared = saved.prepared.const_data_ptr();
  p.transitions = saved.transitions.const_data_ptr<float>();
  p.factors = r.factors.mutable_data_ptr<float>();
  p.initial = input<4>(r.dfinal);
  p.final = output<4>(r.dinitial);
  p.dz = output<4>(dz);
  p.in_place = dz_is_dv;
  p.gradients = r.gradients.mutable_data_ptr();
  const auto workspace = new_workspace(a, kernels::delta_reverse_workspace(p));
  p.workspace = workspace.mutable_data_ptr();
  GIRIH_LAUNCH(delta_reverse, p);
  return r;
}

}  // namespace girih::delta_product

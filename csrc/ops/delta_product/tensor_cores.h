// The tensor-core kernels of delta_product.
#pragma once

#include "arguments.h"
#include "aten.h"

namespace girih::delta_product {

inline Results run_forward(const Call& call, const Problem::SavedShapes& saved_shapes) {
  const Arguments a(call);
  const auto options = a.q.options();
  const auto states = new_saved(saved_shapes.states, options.dtype(saved_shapes.states_type)),
             prepared = new_saved(saved_shapes.prepared, options.dtype(saved_shapes.prepared_type)),
             transitions = new_saved(saved_shapes.transitions, options.dtype(at::kFloat));
  // As computed by Problem::saved.
  TORCH_INTERNAL_ASSERT(
      !saved_shapes.has_saved ||
      (states.size(0) == kernels::token_range_count(a.shape.tokens, kernels::delta_chunk_tokens(a.shape.n)) &&
       transitions.size(0) == kernels::delta_saved_segments(a.shape)));
  const auto initial = a.pad(call.state_s), last = a.new_state(),
             o = a.new_rows(a.q.size(1), a.shape.output_heads, a.shape.V, a.q.scalar_type());
  kernels::DeltaForward p;
  a.fill(p, call);
  p.g = input<3>(a.g);
  p.initial = input<4>(initial);
  p.final = output<4>(last);
  p.o = output<4>(o);
  // Null without a backward call: these tensors are empty then.
  p.states = states.mutable_data_ptr();
  p.prepared = prepared.mutable_data_ptr();
  p.transitions = transitions.mutable_data_ptr<float>();
  GIRIH_RUN(delta_forward, p, a.q);
  return {crop_width(o, a.V), crop_state(last, a.D, a.V), std::nullopt, states, prepared, transitions};
}

inline Gradients run_backward(const Call& call, const OutputGradients& grads, const SavedTensors& saved) {
  const Arguments a(call);
  const auto& shape = a.shape;
  const auto T = call.q.size(1), rows = T * call.n;
  const int64_t H = shape.heads, HO = shape.output_heads;
  const auto type = call.q.scalar_type();
  const bool has_channel_beta = call.has_channel_beta();
  const auto dout = align_output_gradient(grads.o, a.q, HO, shape.V, type);
  // The initial state is read with gates only.
  const auto initial = a.g.defined() ? a.pad(call.state_s) : Tensor(), dfinal = a.pad(grads.s),
             dinitial = a.new_state();
  // Several outputs of one memory write partial gradients of k in fp32, which are summed later; with a beta
  // for every channel the kernels sum them.
  const auto key_heads = has_channel_beta ? H : HO;
  const auto dq = a.new_rows(T, HO, shape.D, type),
             dk = a.new_rows(rows, key_heads, shape.D, key_heads == H ? type : at::kFloat),
             dv = a.new_rows(rows, H, shape.V, type),
             dbeta = has_channel_beta ? a.new_rows(rows, H, shape.D, a.beta.scalar_type())
                                      : a.new_rows(rows, H, 1, at::kFloat),
             dg = a.g.defined() ? a.new_rows(T, HO, 1, at::kFloat).squeeze(-1) : Tensor();
  kernels::DeltaBackward p;
  a.fill(p, call);
  p.dout = input<4>(dout);
  p.initial = input<4>(initial), p.dfinal = input<4>(dfinal);
  p.states = saved.states.const_data_ptr();
  p.prepared = saved.prepared.const_data_ptr();
  p.transitions = saved.transitions.const_data_ptr<float>();
  p.dinitial = output<4>(dinitial);
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
  p.dbeta = output<4>(dbeta), p.dg = output<3>(dg);
  GIRIH_RUN(delta_backward, p, a.q);

  return {sum_head_groups(dq, call.q.size(2), a.D, call.q),
          sum_head_groups(dk, call.k.size(2), a.D, call.k),
          crop_width(dv, a.V),
          (has_channel_beta ? crop_width(dbeta, a.D) : dbeta.squeeze(-1)).to(call.beta.scalar_type()),
          if_defined(call.g, [&] { return sum_head_groups(dg.unsqueeze(-1), H, 1, *call.g).squeeze(-1); }),
          if_defined(call.state_s, [&] { return crop_state(dinitial, a.D, a.V); }),
          std::nullopt,
          std::nullopt};
}

}  // namespace girih::delta_product

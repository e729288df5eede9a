// gla by its kernels: those of the tensor cores for 16-bit elements with keys of up to 128 channels, the
// exact ones for the rest. float64 has none: the ATen form serves it.
#include "../dispatch.h"
#include "../gated_exact.h"
#include "aten.h"
#include "gla/gla.h"
#include "problem.h"

namespace girih::gla {
namespace {

using Gradients = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor>;

std::optional<Kernels> kernels_for(const Tensor& q, const Tensor& v, const c10::SymInt& sequences) {
  if (q.scalar_type() == at::kDouble || sequences == 0) return std::nullopt;
  if (q.scalar_type() == at::kFloat || q.size(3) > kernels::kGsaMaxSlots ||
      v.size(3) > kernels::kGsaMaxWidth) {
    return Kernels::exact;
  }
  bool fits = false;  // gla's ask for less than gsa's
  check_launch("gsa_fits", kernels::gsa_fits(static_cast<int>(q.size(3)), fits));
  return fits ? Kernels::tensor : Kernels::exact;
}

// A gate for every channel.
Tensor channel_gates(const Tensor& k, const OptionalTensor& g) {
  if (!given(g)) return at::zeros(k.sizes(), k.options().dtype(at::kFloat));
  return g->dim() == 4 ? *g : g->unsqueeze(-1).expand(k.sizes());
}

GatedArguments arguments(Kernels by, const Tensor& q, const Tensor& k, const Tensor& v,
                         const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                         const std::optional<double>& scale) {
  return {by, q, k, v, std::nullopt, channel_gates(k, g), cu_seqlens, scale, kernels::Feature::none, true};
}

Results forward_exact(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                      const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                      std::optional<double> scale, const Tensor& saved) {
  const auto a = arguments(Kernels::exact, q, k, v, g, cu_seqlens, scale);
  const auto& shape = a.shape;
  const auto states = a.states();
  const auto last =
      gated_scan(a, false, {}, {}, a.v, a.k, {}, padded_state(state_s, true, shape.V, shape.M), states);
  const auto p = a.q.to(at::kFloat) * shape.scale;
  return {without_packs(ExactReads(a, states, false).key(p, a.k, a.v, 0), a.V), cut(last.v.mT(), a.M, a.V),
          saved};
}

Gradients backward_exact(const OptionalTensor& grad_o, const OptionalTensor& grad_s, const Tensor& q,
                         const Tensor& k, const Tensor& v, const OptionalTensor& g,
                         const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                         std::optional<double> scale) {
  const auto a = arguments(Kernels::exact, q, k, v, g, cu_seqlens, scale);
  const auto& shape = a.shape;
  const auto type = q.scalar_type();
  const auto dout = given(grad_o) ? in_packs(*grad_o) : a.rows(shape.query_heads, shape.V, type).zero_();

  // The states again: kept, they would be fp32 and the largest tensor of all.
  const auto states = a.states();
  const auto last =
      gated_scan(a, false, {}, {}, a.v, a.k, {}, padded_state(state_s, true, shape.V, shape.M), states);

  const auto p = a.q.to(at::kFloat) * shape.scale;
  const auto dp = ExactReads(a, states, false).value({{dout, a.v, a.k, 0}});

  const auto gradients = a.states();
  const auto start =
      gated_scan(a, true, {}, {}, dout, p, {}, padded_state(grad_s, true, shape.V, shape.M), gradients);
  const ExactReads writes(a, gradients, true);
  const auto dk = writes.value({{a.v, dout, p, 0}});
  const auto dv = writes.key(a.k, p, dout, 0);

  OptionalTensor gates;
  if (given(g)) {
    const auto dg =
        exact_gate_gradient(a, p * dp, a.k.to(at::kFloat), dk, false, states, gradients, last, start);
    gates = (g->dim() == 4 ? without_packs(dg, a.M) : dg.sum(-1)).to(g->scalar_type());
  }
  return {without_packs((dp * shape.scale).to(type), a.M),
          without_packs(dk.to(type), a.M),
          without_packs(dv, a.V),
          gates,
          if_given(state_s, [&] { return cut(start.v.mT(), a.M, a.V); }),
          std::nullopt};
}

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                     const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                     std::optional<double> scale, bool save) {
  const auto problem = Problem::check(q, k, v, g, state_s, cu_seqlens);
  const c10::cuda::CUDAGuard device(q.device());
  const auto by = kernels_for(q, v, problem.N);
  if (!by) return forward(q, k, v, g, state_s, cu_seqlens, scale, save);
  if (by == Kernels::exact) {
    const auto saved =
        at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(problem.saved(q, cu_seqlens, save)), q.options());
    return forward_exact(q, k, v, g, state_s, cu_seqlens, scale, saved);
  }
  const auto a = arguments(Kernels::tensor, q, k, v, g, cu_seqlens, scale);
  const auto& shape = a.shape;
  const auto states = a.states();
  const auto last =
      gated_scan(a, false, {}, {}, a.v, a.k, {}, padded_state(state_s, true, shape.V, shape.M), states);
  const auto o = a.rows(shape.query_heads, shape.V, q.scalar_type());
  kernels::GlaOutput p;
  p.shape = shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(a.v), p.g = input<4>(a.g);
  p.states = states.const_data_ptr();
  p.o = output<4>(o);
  check_launch("gla_output", kernels::gla_output(p, c10::cuda::getCurrentCUDAStream()));
  return {without_packs(o, a.V), cut(last.v.mT(), a.M, a.V), save ? states : at::empty({0}, q.options())};
}

Gradients backward_cuda(const OptionalTensor& grad_o, const OptionalTensor& grad_s, const Tensor& q,
                        const Tensor& k, const Tensor& v, const OptionalTensor& g,
                        const OptionalTensor& state_s, const OptionalTensor& cu_seqlens, const Tensor& states,
                        std::optional<double> scale) {
  const auto problem = Problem::check(q, k, v, g, state_s, cu_seqlens);
  const c10::cuda::CUDAGuard device(q.device());
  const auto by = kernels_for(q, v, problem.N);
  if (!by) {
    // What every device without a kernel runs: autograd of the ATen form.
    static const auto op = find("gla_backward").typed<decltype(backward_cuda)>();
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), grad_o, grad_s, q, k, v, g, state_s,
                         cu_seqlens, states, scale);
  }
  if (by == Kernels::exact) {
    return backward_exact(grad_o, grad_s, q, k, v, g, state_s, cu_seqlens, scale);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto a = arguments(Kernels::tensor, q, k, v, g, cu_seqlens, scale);
  const auto& shape = a.shape;
  check_kept("gla", states, problem.saved(q, cu_seqlens, true), q.scalar_type());
  const auto HQ = shape.query_heads;
  const auto type = q.scalar_type();
  const auto dout = given(grad_o) ? in_packs(grad_o->to(type)) : a.rows(HQ, shape.V, type).zero_();

  const auto dq = a.rows(HQ, shape.M, type), q_scan = a.rows(HQ, shape.M, type);
  const RowsLeft left(a);
  kernels::GlaRows rows;
  rows.shape = shape;
  rows.q = input<4>(a.q), rows.k = input<4>(a.k), rows.v = input<4>(a.v), rows.g = input<4>(a.g);
  rows.states = states.const_data_ptr();
  rows.dout = input<4>(dout);
  rows.dq = output<4>(dq), rows.q_scan = output<4>(q_scan), rows.left = left.arrays();
  check_launch("gla_rows", kernels::gla_rows(rows, stream));

  const auto gradients = a.states();
  const auto start = gated_scan(a, true, {}, {}, dout, q_scan, {},
                                padded_state(grad_s, true, shape.V, shape.M), gradients, left.how());

  // Several query heads of one memory: each gives its part in fp32.
  const auto part = a.group() == 1 ? type : at::kFloat;
  const auto dk = a.rows(HQ, shape.M, part), dv = a.rows(HQ, shape.V, part),
             dg = a.rows(HQ, shape.M, at::kFloat);
  const auto initial = padded_state(state_s, true, shape.V, shape.M);
  kernels::GatedColumns columns;
  columns.shape = shape;
  columns.s = rows.k, columns.g = rows.g, columns.w = input<4>(left.w);
  columns.memory[1] = {
      rows.v,        rows.dout, rows.q, input<4>(q_scan), input<4>(initial), input<4>(start.v),
      output<4>(dv), shape.V};
  columns.y_scale = shape.scale;
  columns.states = states.const_data_ptr();
  columns.gradients = gradients.const_data_ptr();
  columns.ds = output<4>(dk), columns.dg = output<4>(dg);
  check_launch("gla_columns", kernels::gla_columns(columns, stream));

  OptionalTensor gates;
  if (given(g)) {
    gates = g->dim() == 4 ? a.gathered(dg, a.M, *g) : a.gathered(dg.sum(-1, true), 1, *g).squeeze(-1);
  }
  return {without_packs(dq, a.M),
          a.gathered(dk, a.M, k),
          a.gathered(dv, a.V, v),
          gates,
          if_given(state_s, [&] { return cut(start.v.mT(), a.M, a.V); }),
          std::nullopt};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("gla_forward", &forward_cuda);
  m.impl("gla_backward", &backward_cuda);
}

}  // namespace girih::gla

// gla by its kernels: 16-bit elements, keys of up to 128 channels. The ATen form serves the rest.
#include "../dispatch.h"
#include "../gated_kernels.h"
#include "aten.h"
#include "gla/gla.h"
#include "problem.h"

namespace girih::gla {
namespace {

using Gradients = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor>;

bool has_kernel(const Tensor& q, const Tensor& v, const c10::SymInt& sequences) {
  if ((q.scalar_type() != at::kHalf && q.scalar_type() != at::kBFloat16) ||
      q.size(3) > kernels::kGsaMaxSlots || v.size(3) > kernels::kGsaMaxWidth || sequences == 0) {
    return false;
  }
  bool fits = false;  // gla's ask for less than gsa's
  check_launch("gsa_fits", kernels::gsa_fits(static_cast<int>(q.size(3)), fits));
  return fits;
}

// A gate for every channel.
Tensor channel_gates(const Tensor& k, const OptionalTensor& g) {
  if (!given(g)) return at::zeros(k.sizes(), k.options().dtype(at::kFloat));
  return g->dim() == 4 ? *g : g->unsqueeze(-1).expand(k.sizes());
}

GatedArguments arguments(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                         const OptionalTensor& cu_seqlens, const std::optional<double>& scale) {
  return {q, k, v, std::nullopt, channel_gates(k, g), cu_seqlens, scale, kernels::Feature::none, true};
}

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                     const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                     std::optional<double> scale, bool save) {
  const auto problem = Problem::check(q, k, v, g, state_s, cu_seqlens);
  const c10::cuda::CUDAGuard device(q.device());
  if (!has_kernel(q, v, problem.N)) {
    at::NoTF32Guard exact;
    return forward(q, k, v, g, state_s, cu_seqlens, scale, save);
  }
  const auto a = arguments(q, k, v, g, cu_seqlens, scale);
  const auto& shape = a.shape;
  const auto states = a.states();
  const auto last =
      gated_scan(a, nullptr, {}, {}, a.v, a.k, {}, padded_state(state_s, true, shape.V, shape.M), states);
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
  if (!has_kernel(q, v, problem.N)) {
    // What every device without a kernel runs: autograd of the ATen form.
    static const auto op = find("gla_backward").typed<decltype(backward_cuda)>();
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), grad_o, grad_s, q, k, v, g, state_s,
                         cu_seqlens, states, scale);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto a = arguments(q, k, v, g, cu_seqlens, scale);
  const auto& shape = a.shape;
  const auto HQ = shape.query_heads;
  const auto type = q.scalar_type();
  const auto dout = given(grad_o) ? in_packs(*grad_o) : a.rows(HQ, shape.V, type).zero_();

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
  const auto start =
      gated_scan(a, &left, {}, {}, dout, q_scan, {}, padded_state(grad_s, true, shape.V, shape.M), gradients);

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
          given(state_s) ? OptionalTensor(cut(start.v.mT(), a.M, a.V)) : std::nullopt,
          std::nullopt};
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("gla_forward", &forward_cuda);
  m.impl("gla_backward", &backward_cuda);
}

}  // namespace girih::gla

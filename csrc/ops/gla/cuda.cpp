// CUDA implementation of gla. Tensor cores: 16-bit elements, with one gate per head or none and keys of up to
// 256 channels, or with one gate per channel and keys of up to 128. fp32 kernels: the other calls. float64:
// the ATen form.
#include "../arguments/shared_heads.h"
#include "../gated/gated_exact.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "gla/gla.h"
#include "gla/head.h"
#include "problem.h"

namespace girih::gla {
namespace {

static_assert(kByHead.columns == kernels::kHeadMaxKeys && kKeptPair == kernels::kHeadPair);

using Gradients = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor>;

// The path of the problem, restricted by the shared memory of the device and by the number of sequences.
Path path_of(const Problem& problem, const Tensor& q, const OptionalTensor& g) {
  const auto path = problem.path(q, g);
  if (problem.N == 0) return aten(kNoSequence);
  if (path != Path::Code::tensor_cores) return path;
  const auto D = static_cast<int>(q.size(3));
  bool fits = false;
  if (by_channel(g)) {
    check_launch("gsa_fits", kernels::gsa_fits(D, fits));  // the gla kernels need less than those of gsa
  } else {
    check_launch("head_fits", kernels::head_fits(D, fits));
  }
  return fits ? path : exact(kSmallCard);
}

// One gate per channel: expands gates per head, zeros without gates.
Tensor channel_gates(const Tensor& k, const OptionalTensor& g) {
  if (!given(g)) return at::zeros(k.sizes(), k.options().dtype(at::kFloat));
  return g->dim() == 4 ? *g : g->unsqueeze(-1).expand(k.sizes());
}

GatedArguments arguments(Kernels by, const Tensor& q, const Tensor& k, const Tensor& v,
                         const OptionalTensor& g, const OptionalTensor& cu_seqlens,
                         const std::optional<double>& scale) {
  // These kernels have no shared heads: k has one head per memory, q at least one.
  const auto keys = for_each_head(k, v.size(2));
  return {by,    for_each_head(q, v.size(2)), keys, v, std::nullopt, channel_gates(keys, g), cu_seqlens,
          scale, kernels::Feature::none,      true};
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

  // Computes the states again: in fp32 they would be the largest saved tensor.
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
  return {summed_heads(without_packs((dp * shape.scale).to(type), a.M), q),
          summed_heads(without_packs(dk.to(type), a.M), k),
          without_packs(dv, a.V),
          gates,
          if_given(state_s, [&] { return cut(start.v.mT(), a.M, a.V); }),
          std::nullopt};
}

// The tensors of one call as the kernels with one gate per head read them.
struct HeadArguments {
  Tensor q, k, v, cu_seqlens;
  kernels::HeadShape shape;

  HeadArguments(const Tensor& q_, const Tensor& k_, const Tensor& v_, const OptionalTensor& g,
                const OptionalTensor& cu, const std::optional<double>& scale)
      : q(in_packs(q_)), k(in_packs(k_)), v(in_packs(v_)) {
    if (given(cu)) cu_seqlens = cu->contiguous();
    const auto H = v.size(2);
    shape = {kernel_tokens(q, cu_seqlens),
             static_cast<int>(H),
             static_cast<int>(std::max(q.size(2), H)),
             shared_by(k, H),
             shared_by(q, H),
             static_cast<int>(k.size(3)),
             static_cast<int>(v.size(3)),
             static_cast<int>(k_.size(3)),
             static_cast<int>(v_.size(3)),
             kernel_dtype(q),
             static_cast<float>(scale.value_or(1 / std::sqrt(double(k_.size(3))))),
             input<3>(g)};
  }

  Tensor rows(int64_t width, at::ScalarType type) const {
    return rows_for(q, q.size(1), cu_seqlens, shape.query_heads, width, type);
  }
  // The dtype of dk and dv: fp32 if several outputs read one memory and their gradients are summed.
  at::ScalarType part() const {
    return shape.query_heads == shape.heads ? q.scalar_type() : at::ScalarType(at::kFloat);
  }
  Tensor states(int64_t heads) const {
    return at::empty({kernels::piece_count(shape.tokens, kernels::kHeadPair), heads, shape.V, shape.D},
                     q.options());
  }
};

// Runs head_read; `first` and the returned state are [N, heads, D, V].
Tensor head_read(const HeadArguments& a, kernels::HeadRead p, const OptionalTensor& first, const Tensor& o,
                 const Tensor& states) {
  const auto options = a.q.options().dtype(at::kFloat);
  const auto heads = p.reverse ? a.shape.query_heads : a.shape.heads;
  const auto last = at::empty({a.shape.tokens.sequences, heads, a.shape.keys, a.shape.values}, options);
  p.shape = a.shape;
  if (given(first)) p.initial = input<4>(first->mT());
  p.final = output<4>(last.mT());
  p.o = output<4>(o);
  if (states.defined()) p.states = states.mutable_data_ptr();
  const auto workspace = at::empty({kernels::head_read_workspace(p)}, options.dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  check_launch("head_read", kernels::head_read(p, c10::cuda::getCurrentCUDAStream()));
  return last;
}

Results forward_head(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                     const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                     std::optional<double> scale, bool save) {
  const HeadArguments a(q, k, v, g, cu_seqlens, scale);
  const auto states = save ? a.states(a.shape.heads) : Tensor();
  const auto o = a.rows(a.shape.V, q.scalar_type());
  kernels::HeadRead p{};
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(a.v);
  const auto last = head_read(a, p, state_s, o, states);
  return {without_packs(o, a.shape.values), last, save ? states : at::empty({0}, q.options())};
}

Gradients backward_head(const OptionalTensor& grad_o, const OptionalTensor& grad_s, const Tensor& q,
                        const Tensor& k, const Tensor& v, const OptionalTensor& g,
                        const OptionalTensor& state_s, const OptionalTensor& cu_seqlens, const Tensor& states,
                        std::optional<double> scale) {
  const HeadArguments a(q, k, v, g, cu_seqlens, scale);
  const auto& shape = a.shape;
  const int64_t H = shape.heads, group = shape.query_heads / H;
  const auto type = q.scalar_type();
  const auto dout = given(grad_o) ? in_packs(grad_o->to(type)) : a.rows(shape.V, type).zero_();

  // Only the first query head of a memory starts from the gradient of the final state; the gradients of all
  // heads are summed later.
  OptionalTensor first = grad_s;
  if (given(grad_s) && group > 1) {
    first = at::zeros({grad_s->size(0), H, group, shape.keys, shape.values}, grad_s->options());
    first->select(2, 0).copy_(*grad_s);
    first = first->flatten(1, 2);
  }
  const auto dv = a.rows(shape.V, a.part());
  const auto gradients = a.states(shape.query_heads);
  kernels::HeadRead p{};
  p.reverse = true;
  p.q = input<4>(a.k), p.k = input<4>(a.q), p.v = input<4>(dout);
  const auto start = head_read(a, p, first, dv, gradients);

  const auto dq = a.rows(shape.D, type), dk = a.rows(shape.D, a.part());
  kernels::HeadGradients of;
  of.shape = shape;
  of.q = input<4>(a.q), of.k = input<4>(a.k), of.v = input<4>(a.v), of.dout = input<4>(dout);
  of.states = states.const_data_ptr();
  of.gradients = gradients.const_data_ptr();
  if (given(state_s)) of.initial = input<4>(state_s->mT());
  of.start = input<4>(start.mT());
  of.dq = output<4>(dq), of.dk = output<4>(dk);
  check_launch("head_gradient_tile", kernels::head_gradient_tile(shape.D, of.tile));
  OptionalTensor dg;
  Tensor dg_parts, across;
  if (given(g)) {
    dg = at::empty(g->sizes(), g->options());
    dg_parts = a.rows(of.tiles(), at::kFloat);
    across = at::empty({kernels::piece_count(shape.tokens, kernels::kChunk), shape.query_heads, of.tiles()},
                       dg_parts.options());
    of.dg = output<3>(*dg);
    of.dg_parts = dg_parts.mutable_data_ptr<float>(), of.across = across.mutable_data_ptr<float>();
  }
  check_launch("head_gradients", kernels::head_gradients(of, c10::cuda::getCurrentCUDAStream()));

  return {gathered(dq, q.size(2), shape.keys, q),
          gathered(dk, k.size(2), shape.keys, k),
          gathered(dv, H, shape.values, v),
          dg,
          if_given(state_s,
                   [&] {
                     return group == 1 ? start : start.unflatten(1, {H, group}).sum(2);
                   }),
          std::nullopt};
}

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                     const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                     std::optional<double> scale, bool save) {
  const auto problem = Problem::check(q, k, v, g, state_s, cu_seqlens, scale);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, g);
  if (path == Path::Code::aten) return forward(q, k, v, g, state_s, cu_seqlens, scale, save);
  if (path == Path::Code::exact) {
    const auto saved =
        at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(problem.saved(q, g, cu_seqlens, save)), q.options());
    return forward_exact(q, k, v, g, state_s, cu_seqlens, scale, saved);
  }
  if (!by_channel(g)) return forward_head(q, k, v, g, state_s, cu_seqlens, scale, save);
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
  const auto problem = Problem::check(q, k, v, g, state_s, cu_seqlens, scale);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, g);
  if (path == Path::Code::aten) {
    // Autograd of the ATen form, as on devices without a kernel.
    return run_without_kernel<&backward_cuda>("gla_backward", grad_o, grad_s, q, k, v, g, state_s, cu_seqlens,
                                              states, scale);
  }
  if (path == Path::Code::exact) {
    return backward_exact(grad_o, grad_s, q, k, v, g, state_s, cu_seqlens, scale);
  }
  check_kept("gla", "states", states, problem.saved(q, g, cu_seqlens, true), q.scalar_type());
  if (!by_channel(g)) {
    return backward_head(grad_o, grad_s, q, k, v, g, state_s, cu_seqlens, states, scale);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto a = arguments(Kernels::tensor, q, k, v, g, cu_seqlens, scale);
  const auto& shape = a.shape;
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

  // Several query heads of one memory write partial gradients in fp32, which are summed later.
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

  return {summed_heads(without_packs(dq, a.M), q),
          summed_heads(a.gathered(dk, a.M, k), k),
          a.gathered(dv, a.V, v),
          a.gathered(dg, a.M, *g),
          if_given(state_s, [&] { return cut(start.v.mT(), a.M, a.V); }),
          std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                 const Tensor& state_s, std::optional<double> scale) {
  check_step(describe("gla"), q, {state_s});
  Problem::check(q, k, v, g, state_s, std::nullopt, scale);
  if (Problem::step_path(q) == Path::Code::aten) {
    return run_without_kernel<&step_cuda>("gla_step", q, k, v, g, state_s, scale);
  }
  const c10::cuda::CUDAGuard device(q.device());
  const auto H = v.size(2), HO = std::max(q.size(2), H);
  const auto o = at::empty({q.size(0), 1, HO, v.size(3)}, q.options());
  kernels::GlaStep p;
  p.sequences = q.size(0);
  p.heads = static_cast<int>(H), p.query_heads = static_cast<int>(HO);
  p.key_share = shared_by(k, H), p.query_share = shared_by(q, H);
  p.D = static_cast<int>(q.size(3)), p.V = static_cast<int>(v.size(3));
  p.scale = static_cast<float>(scale.value_or(1 / std::sqrt(double(p.D))));
  p.q = input<3>(q.select(1, 0)), p.k = input<3>(k.select(1, 0)), p.v = input<3>(v.select(1, 0));
  if (given(g)) {
    const auto of_channels = by_channel(g) ? *g : g->unsqueeze(-1).expand({p.sequences, 1, H, p.D});
    p.g = input<3>(of_channels.select(1, 0));
  }
  p.state = output<4>(state_s);
  p.o = output<3>(o.select(1, 0));
  check_launch("gla_step", kernels::gla_step(p, c10::cuda::getCurrentCUDAStream()));
  return o;
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                    const OptionalTensor& state_s, const OptionalTensor& cu_seqlens,
                    std::optional<double> scale, std::string_view device, bool step) {
  const auto p = Problem::check(q, k, v, g, state_s, cu_seqlens, scale);
  const c10::cuda::CUDAGuard guard(q.device());
  return explained(step ? Problem::step_path(q) : path_of(p, q, g), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("gla_explain", &explain);
  m.impl("gla_forward", &forward_cuda);
  m.impl("gla_backward", &backward_cuda);
  m.impl("gla_step", &step_cuda);
}

}  // namespace girih::gla

// CUDA implementation of gsa. Tensor cores: 16-bit elements with gates and up to 128 slots. fp32 kernels: the
// other calls. float64: the ATen form.
#include "../gated/gated_exact.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::gsa {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor>;

// The path of the problem, restricted by the shared memory of the device and by the number of sequences.
Path path_of(const Problem& problem, const Tensor& q, const OptionalTensor& g) {
  const auto path = problem.path(q, g);
  if (problem.N == 0) return aten(kNoSequence);
  if (path != Path::Code::tensor_cores) return path;
  bool fits = false;
  check_launch("gsa_fits", kernels::gsa_fits(static_cast<int>(g->size(3)), fits));
  return fits ? path : exact(kSmallCard);
}

kernels::Feature feature_of(std::string_view name) {
  if (name == "none") return kernels::Feature::none;
  if (name == "silu") return kernels::Feature::silu;
  if (name == "relu") return kernels::Feature::relu;
  if (name == "relu2") return kernels::Feature::relu2;
  return kernels::Feature::softmax;
}

// Weights and gates of the slots; those of ABC (g is None) are computed from its logits.
struct Slots {
  Tensor s, g;
  OptionalTensor z;
};

Slots slots_of(const Tensor& q, const OptionalTensor& s, const OptionalTensor& g,
               const OptionalTensor& state_z, const OptionalTensor& cu_seqlens) {
  if (given(g)) return {given(s) ? *s : g->to(at::kFloat).expm1().neg_(), *g, std::nullopt};
  const auto logits = s->to(at::kFloat);
  const auto cu = given(cu_seqlens) ? cu_seqlens->contiguous() : Tensor();
  const auto rows = [&] { return given(cu_seqlens) ? at::zeros_like(logits) : at::empty_like(logits); };
  kernels::AbcGates p;
  p.tokens = kernel_tokens(q, cu);
  p.heads = static_cast<int>(s->size(2)), p.M = static_cast<int>(s->size(3));
  const Slots slots{rows(), rows(), at::empty({p.tokens.sequences, p.heads, p.M}, logits.options())};
  p.logits = input<4>(logits), p.initial = input<3>(state_z);
  p.s = output<4>(slots.s), p.g = output<4>(slots.g), p.final = output<3>(*slots.z);
  const auto workspace =
      at::empty({kernels::abc_workspace(p.tokens, p.heads, p.M)}, logits.options().dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  check_launch("abc_gates", kernels::abc_gates(p, c10::cuda::getCurrentCUDAStream()));
  return slots;
}

// The gradients of the logits of ABC and of its initial z.
std::pair<Tensor, OptionalTensor> abc_gradient(const GatedArguments& a, const Slots& slots, const Tensor& ds,
                                               const Tensor& dg, const OptionalTensor& grad_z,
                                               const OptionalTensor& state_z) {
  kernels::AbcGradient p;
  p.tokens = a.shape.tokens;
  p.heads = a.shape.heads, p.M = static_cast<int>(a.M);
  const auto dlogits = a.rows(p.heads, p.M, at::kFloat);
  const auto start =
      given(state_z) ? OptionalTensor(at::empty(state_z->sizes(), state_z->options())) : std::nullopt;
  p.s = input<4>(slots.s), p.g = input<4>(slots.g), p.ds = input<4>(ds), p.dg = input<4>(dg);
  p.final = input<3>(grad_z), p.initial = input<3>(state_z);
  p.dlogits = output<4>(dlogits);
  if (start) p.dinitial = output<3>(*start);
  const auto workspace =
      at::empty({kernels::abc_workspace(p.tokens, p.heads, p.M)}, dlogits.options().dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  check_launch("abc_gradient", kernels::abc_gradient(p, c10::cuda::getCurrentCUDAStream()));
  return {dlogits, start};
}

// z [B, T, HQ, M] <- p = feature(z). If dp is defined: dp <- dz, and w <- the contribution of p to the
// gradient of the gates.
void exact_feature(const GatedArguments& a, const Tensor& z, const Tensor& dp, const Tensor& w) {
  kernels::ExactFeature p{};
  p.rows = z.size(0) * z.size(1) * z.size(2);
  p.M = a.shape.M, p.slots = a.shape.slots;
  p.feature = a.shape.feature;
  p.scale = a.shape.scale;
  p.z = z.mutable_data_ptr<float>();
  if (dp.defined()) p.dp = dp.mutable_data_ptr<float>(), p.w = w.mutable_data_ptr<float>();
  check_launch("exact_feature", kernels::exact_feature(p, c10::cuda::getCurrentCUDAStream()));
}

Results forward_exact(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                      const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                      const OptionalTensor& state_z, const OptionalTensor& cu_seqlens,
                      std::optional<double> scale, std::string_view feature, const Tensor& saved) {
  const auto slots = slots_of(q, s, g, state_z, cu_seqlens);
  const GatedArguments a(Kernels::exact, q, k, v, slots.s, slots.g, cu_seqlens, scale, feature_of(feature));
  const auto& shape = a.shape;
  const auto states = a.states();
  const auto last = gated_scan(a, false, a.k, a.s, a.v, a.s, padded_state(state_k, false, shape.D, shape.M),
                               padded_state(state_v, true, shape.V, shape.M), states);
  const ExactReads reads(a, states, false);
  const auto p = reads.value({{a.q, a.k, a.s, 0}});
  exact_feature(a, p, {}, {});
  return {without_packs(reads.key(p, a.s, a.v, shape.D), a.V), cut(last.k, a.D, a.M),
          cut(last.v.mT(), a.M, a.V), slots.z, saved};
}

Gradients backward_exact(const OptionalTensor& grad_o, const OptionalTensor& grad_k,
                         const OptionalTensor& grad_v, const OptionalTensor& grad_z, const Tensor& q,
                         const Tensor& k, const Tensor& v, const OptionalTensor& s, const OptionalTensor& g,
                         const OptionalTensor& state_k, const OptionalTensor& state_v,
                         const OptionalTensor& state_z, const OptionalTensor& cu_seqlens,
                         std::optional<double> scale, std::string_view feature) {
  const auto slots = slots_of(q, s, g, state_z, cu_seqlens);
  const GatedArguments a(Kernels::exact, q, k, v, slots.s, slots.g, cu_seqlens, scale, feature_of(feature));
  const auto& shape = a.shape;
  const auto HQ = shape.query_heads;
  const auto dout = given(grad_o) ? in_packs(*grad_o) : a.rows(HQ, shape.V, q.scalar_type()).zero_();

  // Computes the states again: in fp32 they would be the largest saved tensor.
  const auto states = a.states();
  const auto last = gated_scan(a, false, a.k, a.s, a.v, a.s, padded_state(state_k, false, shape.D, shape.M),
                               padded_state(state_v, true, shape.V, shape.M), states);

  // Gradients of query rows.
  const ExactReads reads(a, states, false);
  const auto p = reads.value({{a.q, a.k, a.s, 0}}), dz = reads.value({{dout, a.v, a.s, shape.D}}),
             w = a.rows(HQ, shape.M, at::kFloat);
  exact_feature(a, p, dz, w);
  const auto dq = reads.key(dz, a.s, a.k, 0);

  // Gradients of key rows.
  const auto gradients = a.states();
  const auto start = gated_scan(a, true, a.q, dz, dout, p, padded_state(grad_k, false, shape.D, shape.M),
                                padded_state(grad_v, true, shape.V, shape.M), gradients);
  const ExactReads writes(a, gradients, true);
  const auto dk = writes.key(a.s, dz, a.q, 0), dv = writes.key(a.s, p, dout, shape.D);
  const auto ds = writes.value({{a.k, a.q, dz, 0}, {a.v, dout, p, shape.D}});
  const auto dg = exact_gate_gradient(a, w, a.s, ds, !given(s), states, gradients, last, start);

  OptionalTensor given_s, given_g, given_z;
  if (given(g)) {
    if (given(s)) given_s = without_packs(ds, a.M).to(s->scalar_type());
    given_g = without_packs(dg, a.M).to(g->scalar_type());
  } else {
    const auto [dlogits, dz0] = abc_gradient(a, slots, ds, dg, grad_z, state_z);
    given_s = dlogits.to(s->scalar_type());
    given_z = dz0;
  }
  return {without_packs(dq, a.D),
          without_packs(dk, a.D),
          without_packs(dv, a.V),
          given_s,
          given_g,
          if_given(state_k, [&] { return cut(start.k, a.D, a.M); }),
          if_given(state_v, [&] { return cut(start.v.mT(), a.M, a.V); }),
          given_z,
          std::nullopt};
}

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                     const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                     const OptionalTensor& state_z, const OptionalTensor& cu_seqlens,
                     std::optional<double> scale, std::string_view feature, bool save) {
  const auto problem = Problem::check(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, g);
  if (path == Path::Code::aten)
    return forward(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature, save);
  if (path == Path::Code::exact) {
    const auto saved =
        at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(problem.saved(q, g, cu_seqlens, save)), q.options());
    return forward_exact(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature, saved);
  }
  const GatedArguments a(Kernels::tensor, q, k, v, s, *g, cu_seqlens, scale, feature_of(feature));
  const auto& shape = a.shape;
  const auto states = a.states();
  const auto last = gated_scan(a, false, a.k, a.s, a.v, a.s, padded_state(state_k, false, shape.D, shape.M),
                               padded_state(state_v, true, shape.V, shape.M), states);
  const auto o = a.rows(shape.query_heads, shape.V, q.scalar_type());
  kernels::GsaOutput p;
  p.shape = shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(a.v), p.s = input<4>(a.s), p.g = input<4>(a.g);
  p.states = states.const_data_ptr();
  p.o = output<4>(o);
  check_launch("gsa_output", kernels::gsa_output(p, c10::cuda::getCurrentCUDAStream()));
  return {without_packs(o, a.V), cut(last.k, a.D, a.M), cut(last.v.mT(), a.M, a.V), std::nullopt,
          save ? states : at::empty({0}, q.options())};
}

Gradients backward_cuda(const OptionalTensor& grad_o, const OptionalTensor& grad_k,
                        const OptionalTensor& grad_v, const OptionalTensor& grad_z, const Tensor& q,
                        const Tensor& k, const Tensor& v, const OptionalTensor& s, const OptionalTensor& g,
                        const OptionalTensor& state_k, const OptionalTensor& state_v,
                        const OptionalTensor& state_z, const OptionalTensor& cu_seqlens, const Tensor& states,
                        std::optional<double> scale, std::string_view feature) {
  const auto problem = Problem::check(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, g);
  if (path == Path::Code::aten) {
    // Autograd of the ATen form, as on devices without a kernel.
    return run_without_kernel<&backward_cuda>("gsa_backward", grad_o, grad_k, grad_v, grad_z, q, k, v, s, g,
                                              state_k, state_v, state_z, cu_seqlens, states, scale, feature);
  }
  if (path == Path::Code::exact) {
    return backward_exact(grad_o, grad_k, grad_v, grad_z, q, k, v, s, g, state_k, state_v, state_z,
                          cu_seqlens, scale, feature);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();

  const GatedArguments a(Kernels::tensor, q, k, v, s, *g, cu_seqlens, scale, feature_of(feature));
  const auto& shape = a.shape;
  check_kept("gsa", "states", states, problem.saved(q, g, cu_seqlens, true), q.scalar_type());
  const auto HQ = shape.query_heads;
  const auto type = q.scalar_type();
  const auto dout = given(grad_o) ? in_packs(grad_o->to(type)) : a.rows(HQ, shape.V, type).zero_();

  const auto dq = a.rows(HQ, shape.D, type), p = a.rows(HQ, shape.M, type), dz = a.rows(HQ, shape.M, type),
             p_scan = a.rows(HQ, shape.M, type), dz_scan = a.rows(HQ, shape.M, type);
  const RowsLeft left(a);
  kernels::GsaRows rows;
  rows.shape = shape;
  rows.q = input<4>(a.q), rows.k = input<4>(a.k), rows.v = input<4>(a.v), rows.s = input<4>(a.s);
  rows.g = input<4>(a.g);
  rows.states = states.const_data_ptr();
  rows.dout = input<4>(dout);
  rows.dq = output<4>(dq), rows.p = output<4>(p), rows.dz = output<4>(dz), rows.left = left.arrays();
  rows.p_scan = output<4>(p_scan), rows.dz_scan = output<4>(dz_scan);
  check_launch("gsa_rows", kernels::gsa_rows(rows, stream));

  const auto gradients = a.states();
  const auto start =
      gated_scan(a, true, a.q, dz_scan, dout, p_scan, padded_state(grad_k, false, shape.D, shape.M),
                 padded_state(grad_v, true, shape.V, shape.M), gradients, left.how());

  // Several query heads of one memory write partial gradients in fp32, which are summed later.
  const auto part = a.group() == 1 ? type : at::kFloat;
  const auto dk = a.rows(HQ, shape.D, part), dv = a.rows(HQ, shape.V, part),
             dg = a.rows(HQ, shape.M, at::kFloat);
  const auto ds = a.s.defined() ? a.rows(HQ, shape.M, part) : Tensor();
  const auto initial_k = padded_state(state_k, false, shape.D, shape.M),
             initial_v = padded_state(state_v, true, shape.V, shape.M);
  kernels::GatedColumns columns;
  columns.shape = shape;
  columns.s = rows.s, columns.g = rows.g, columns.w = input<4>(left.w);
  columns.memory[0] = {
      rows.k,        rows.q, input<4>(dz), input<4>(dz_scan), input<4>(initial_k), input<4>(start.k),
      output<4>(dk), shape.D};
  columns.memory[1] = {
      rows.v,        rows.dout, input<4>(p), input<4>(p_scan), input<4>(initial_v), input<4>(start.v),
      output<4>(dv), shape.V};
  columns.y_scale = 1;
  columns.states = states.const_data_ptr();
  columns.gradients = gradients.const_data_ptr();
  columns.ds = output<4>(ds), columns.dg = output<4>(dg);
  check_launch("gsa_columns", kernels::gsa_columns(columns, stream));

  return {without_packs(dq, a.D),
          a.gathered(dk, a.D, k),
          a.gathered(dv, a.V, v),
          if_given(s, [&] { return a.gathered(ds, a.M, *s); }),
          a.gathered(dg, a.M, *g),
          if_given(state_k, [&] { return cut(start.k, a.D, a.M); }),
          if_given(state_v, [&] { return cut(start.v.mT(), a.M, a.V); }),
          std::nullopt,
          std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                 const OptionalTensor& g, const Tensor& state_k, const Tensor& state_v,
                 const OptionalTensor& state_z, std::optional<double> scale, std::string_view feature) {
  check_step(describe("gsa"), q, {state_k, state_v, state_z});
  Problem::check(q, k, v, s, g, state_k, state_v, state_z, std::nullopt, scale, feature);
  if (Problem::step_path(q) == Path::Code::aten) {
    return run_without_kernel<&step_cuda>("gsa_step", q, k, v, s, g, state_k, state_v, state_z, scale,
                                          feature);
  }
  const c10::cuda::CUDAGuard device(q.device());
  const auto token = [](const OptionalTensor& x) { return given(x) ? x->select(1, 0) : Tensor(); };
  const auto o = at::empty({q.size(0), 1, q.size(2), v.size(3)}, q.options());
  kernels::GsaStep p;
  p.sequences = q.size(0);
  p.heads = static_cast<int>(k.size(2)), p.query_heads = static_cast<int>(q.size(2));
  p.D = static_cast<int>(q.size(3)), p.V = static_cast<int>(v.size(3)),
  p.M = static_cast<int>(state_k.size(3));
  p.feature = feature_of(feature);
  p.scale = static_cast<float>(scale.value_or(1 / std::sqrt(double(p.D))));
  p.q = input<3>(token(q)), p.k = input<3>(token(k)), p.v = input<3>(token(v));
  p.s = input<3>(token(s)), p.g = input<3>(token(g));
  p.state_k = output<4>(state_k), p.state_v = output<4>(state_v);
  if (given(state_z)) p.z = output<3>(*state_z);
  p.o = output<3>(o.select(1, 0));
  check_launch("gsa_step", kernels::gsa_step(p, c10::cuda::getCurrentCUDAStream()));
  return o;
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                    const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                    const OptionalTensor& state_z, const OptionalTensor& cu_seqlens,
                    std::optional<double> scale, std::string_view feature, std::string_view device,
                    bool step) {
  const auto p = Problem::check(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature);
  const c10::cuda::CUDAGuard guard(q.device());
  return explained(step ? Problem::step_path(q) : path_of(p, q, g), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("gsa_explain", &explain);
  m.impl("gsa_forward", &forward_cuda);
  m.impl("gsa_backward", &backward_cuda);
  m.impl("gsa_step", &step_cuda);
}

}  // namespace girih::gsa

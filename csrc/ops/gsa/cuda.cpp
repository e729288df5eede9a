// CUDA implementation of gsa. Tensor cores: 16-bit elements with gates and up to 128 slots. fp32 kernels: the
// other calls. float64: the ATen form.
#include "../gated/gated_fp32.h"
#include "aten.h"

namespace girih::gsa {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor>;

// The gradients of the outputs.
struct OutputGradients {
  static auto arguments(auto& g) { return std::tie(g.o, g.k, g.v, g.z); }
  OptionalTensor o, k, v, z;
};

struct SavedTensors {
  static auto arguments(auto& saved) { return std::tie(saved.states); }
  Tensor states;
};

Path choose_path(const Problem& problem, const Call& call) {
  const auto path = problem.path(call);
  const auto fits = [&] {
    bool fits = true;
    if (path == Path::Code::tensor_cores) GIRIH_QUERY(gsa_fits, static_cast<int>(call.g->size(3)), fits);
    return fits;
  };
  return restrict_path(path, problem.N, call.q.device(), fits, &fp32);
}

kernels::Feature parse_feature(std::string_view name) {
  if (name == "none") return kernels::Feature::none;
  if (name == "silu") return kernels::Feature::silu;
  if (name == "relu") return kernels::Feature::relu;
  if (name == "relu2") return kernels::Feature::relu2;
  return kernels::Feature::softmax;
}

// Weights and gates of the slots; those of ABC (g is None) are computed from its logits.
struct SlotGates {
  Tensor s, g;
  OptionalTensor z;
};

SlotGates compute_slot_gates(const Call& call) {
  const auto &s = call.s, &g = call.g;
  if (is_defined(g)) return {is_defined(s) ? *s : g->to(at::kFloat).expm1().neg_(), *g, std::nullopt};
  const auto logits = s->to(at::kFloat);
  const auto cu_seqlens = contiguous_or_undefined(call.cu_seqlens);
  const auto rows = [&] { return cu_seqlens.defined() ? at::zeros_like(logits) : at::empty_like(logits); };
  kernels::AbcGates p;
  p.tokens = sequence_layout(call.q, cu_seqlens);
  p.heads = static_cast<int>(s->size(2)), p.M = static_cast<int>(s->size(3));
  const SlotGates slots{rows(), rows(), at::empty({p.tokens.sequences, p.heads, p.M}, logits.options())};
  p.logits = input<4>(logits), p.initial = input<3>(call.state_z);
  p.s = output<4>(slots.s), p.g = output<4>(slots.g), p.final = output<3>(*slots.z);
  const auto workspace =
      at::empty({kernels::abc_workspace(p.tokens, p.heads, p.M)}, logits.options().dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  GIRIH_LAUNCH(abc_gates, p);
  return slots;
}

// The gradients of the logits of ABC and of its initial z.
std::pair<Tensor, OptionalTensor> abc_gradient(const GatedArguments& a, const SlotGates& slots,
                                               const Tensor& ds, const Tensor& dg,
                                               const OptionalTensor& grad_z, const OptionalTensor& state_z) {
  kernels::AbcGradient p;
  p.tokens = a.shape.tokens;
  p.heads = a.shape.heads, p.M = static_cast<int>(a.M);
  const auto dlogits = a.new_rows(p.heads, p.M, at::kFloat);
  const auto dinitial = if_defined(state_z, [&] { return at::empty(state_z->sizes(), state_z->options()); });
  p.s = input<4>(slots.s), p.g = input<4>(slots.g), p.ds = input<4>(ds), p.dg = input<4>(dg);
  p.final = input<3>(grad_z), p.initial = input<3>(state_z);
  p.dlogits = output<4>(dlogits);
  if (dinitial) p.dinitial = output<3>(*dinitial);
  const auto workspace =
      at::empty({kernels::abc_workspace(p.tokens, p.heads, p.M)}, dlogits.options().dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  GIRIH_LAUNCH(abc_gradient, p);
  return {dlogits, dinitial};
}

// z [B, T, HQ, M] <- p = feature(scale z). If dp is defined: dp <- dz, and w <- z dz + p dp, for the gradient
// of the gates.
void fp32_feature(const GatedArguments& a, const Tensor& z, const Tensor& dp, const Tensor& w) {
  kernels::Fp32Feature p{};
  p.rows = z.size(0) * z.size(1) * z.size(2);
  p.M = a.shape.M, p.slots = a.shape.slots;
  p.feature = a.shape.feature;
  p.scale = a.shape.scale;
  p.z = z.mutable_data_ptr<float>();
  if (dp.defined()) p.dp = dp.mutable_data_ptr<float>(), p.w = w.mutable_data_ptr<float>();
  GIRIH_LAUNCH(fp32_feature, p);
}

GatedArguments gated_arguments(KernelKind kind, const Call& call, const OptionalTensor& s, const Tensor& g) {
  return {
      kind, call.q, call.k, call.v, s, g, call.cu_seqlens, call.query_scale(), parse_feature(call.feature)};
}

Results forward_fp32(const Call& call, const Problem& problem, bool save) {
  const auto slots = compute_slot_gates(call);
  const auto a = gated_arguments(KernelKind::fp32, call, slots.s, slots.g);
  const auto& shape = a.shape;
  const auto states = a.new_states();
  const auto last = gated_scan(a, false, a.k, a.s, a.v, a.s, pad_state(call.state_k, false, shape.D, shape.M),
                               pad_state(call.state_v, true, shape.V, shape.M), states);
  const Fp32Reads reads(a, states, false);
  const auto p = reads.value({{a.q, a.k, a.s, 0}});
  fp32_feature(a, p, {}, {});
  return {crop_width(reads.key(p, a.s, a.v, shape.D), a.V), crop_state(last.k, a.D, a.M),
          crop_state(last.v.mT(), a.M, a.V), slots.z, new_saved(problem.saved(call, save), call.q.options())};
}

Gradients backward_fp32(const Call& call, const OutputGradients& grads) {
  const auto slots = compute_slot_gates(call);
  const auto a = gated_arguments(KernelKind::fp32, call, slots.s, slots.g);
  const auto& shape = a.shape;
  const auto HQ = shape.query_heads;
  const auto dout = align_output_gradient(grads.o, call.q, HQ, shape.V, call.q.scalar_type());

  // Computes the states again: in fp32 they would be the largest saved tensor.
  const auto states = a.new_states();
  const auto last = gated_scan(a, false, a.k, a.s, a.v, a.s, pad_state(call.state_k, false, shape.D, shape.M),
                               pad_state(call.state_v, true, shape.V, shape.M), states);

  // Gradients of query rows.
  const Fp32Reads reads(a, states, false);
  const auto p = reads.value({{a.q, a.k, a.s, 0}}), dz = reads.value({{dout, a.v, a.s, shape.D}}),
             w = a.new_rows(HQ, shape.M, at::kFloat);
  fp32_feature(a, p, dz, w);
  const auto dq = reads.key(dz, a.s, a.k, 0);

  // Gradients of key rows.
  const auto gradients = a.new_states();
  const auto dinitial = gated_scan(a, true, a.q, dz, dout, p, pad_state(grads.k, false, shape.D, shape.M),
                                   pad_state(grads.v, true, shape.V, shape.M), gradients);
  const Fp32Reads writes(a, gradients, true);
  const auto dk = writes.key(a.s, dz, a.q, 0), dv = writes.key(a.s, p, dout, shape.D);
  const auto ds = writes.value({{a.k, a.q, dz, 0}, {a.v, dout, p, shape.D}});
  const auto dg = fp32_gate_gradient(a, w, a.s, ds, !is_defined(call.s), states, gradients, last, dinitial);

  OptionalTensor grad_in_s, grad_in_g, grad_in_z;
  if (is_defined(call.g)) {
    if (is_defined(call.s)) grad_in_s = crop_width(ds, a.M).to(call.s->scalar_type());
    grad_in_g = crop_width(dg, a.M).to(call.g->scalar_type());
  } else {
    const auto [dlogits, dz0] = abc_gradient(a, slots, ds, dg, grads.z, call.state_z);
    grad_in_s = dlogits.to(call.s->scalar_type());
    grad_in_z = dz0;
  }
  return {crop_width(dq, a.D),
          crop_width(dk, a.D),
          crop_width(dv, a.V),
          grad_in_s,
          grad_in_g,
          if_defined(call.state_k, [&] { return crop_state(dinitial.k, a.D, a.M); }),
          if_defined(call.state_v, [&] { return crop_state(dinitial.v.mT(), a.M, a.V); }),
          grad_in_z,
          std::nullopt};
}

Results forward_cuda(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return WithoutTF32<&forward>::call(call, save);
  if (path == Path::Code::fp32) return forward_fp32(call, problem, save);
  const auto a = gated_arguments(KernelKind::tensor, call, call.s, *call.g);
  const auto& shape = a.shape;
  const auto states = a.new_states();
  const auto last = gated_scan(a, false, a.k, a.s, a.v, a.s, pad_state(call.state_k, false, shape.D, shape.M),
                               pad_state(call.state_v, true, shape.V, shape.M), states);
  const auto o = a.new_rows(shape.query_heads, shape.V, call.q.scalar_type());
  kernels::GsaOutput p;
  p.shape = shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(a.v), p.s = input<4>(a.s), p.g = input<4>(a.g);
  p.states = states.const_data_ptr();
  p.o = output<4>(o);
  GIRIH_LAUNCH(gsa_output, p);
  return {crop_width(o, a.V), crop_state(last.k, a.D, a.M), crop_state(last.v.mT(), a.M, a.V), std::nullopt,
          save ? states : at::empty({0}, call.q.options())};
}

std::optional<Gradients> backward_cuda(const Call& call, const OutputGradients& grads,
                                       const SavedTensors& saved) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return std::nullopt;
  if (path == Path::Code::fp32) return backward_fp32(call, grads);
  const auto a = gated_arguments(KernelKind::tensor, call, call.s, *call.g);
  const auto& shape = a.shape;
  const auto& states = saved.states;
  check_saved_tensor("gsa", "states", states, problem.saved(call, true), call.q.scalar_type());
  const auto HQ = shape.query_heads;
  const auto type = call.q.scalar_type();
  const auto dout = align_output_gradient(grads.o, call.q, HQ, shape.V, type);

  const auto dq = a.new_rows(HQ, shape.D, type), p = a.new_rows(HQ, shape.M, type),
             dz = a.new_rows(HQ, shape.M, type), p_scan = a.new_rows(HQ, shape.M, type),
             dz_scan = a.new_rows(HQ, shape.M, type);
  const GateGradientBuffers gate_terms(a);
  kernels::GsaDq dq_arguments;
  dq_arguments.shape = shape;
  dq_arguments.q = input<4>(a.q), dq_arguments.k = input<4>(a.k), dq_arguments.v = input<4>(a.v),
  dq_arguments.s = input<4>(a.s);
  dq_arguments.g = input<4>(a.g);
  dq_arguments.states = states.const_data_ptr();
  dq_arguments.dout = input<4>(dout);
  dq_arguments.dq = output<4>(dq), dq_arguments.p = output<4>(p), dq_arguments.dz = output<4>(dz),
  dq_arguments.gate_terms = gate_terms.arrays();
  dq_arguments.p_scan = output<4>(p_scan), dq_arguments.dz_scan = output<4>(dz_scan);
  GIRIH_LAUNCH(gsa_dq, dq_arguments);

  const auto gradients = a.new_states();
  const auto dinitial =
      gated_scan(a, true, a.q, dz_scan, dout, p_scan, pad_state(grads.k, false, shape.D, shape.M),
                 pad_state(grads.v, true, shape.V, shape.M), gradients, gate_terms.factored_data());

  // Several query heads of one memory write partial gradients in fp32, which are summed later.
  const auto partial_type = a.group() == 1 ? type : at::kFloat;
  const auto dk = a.new_rows(HQ, shape.D, partial_type), dv = a.new_rows(HQ, shape.V, partial_type),
             dg = a.new_rows(HQ, shape.M, at::kFloat);
  const auto ds = a.s.defined() ? a.new_rows(HQ, shape.M, partial_type) : Tensor();
  const auto initial_k = pad_state(call.state_k, false, shape.D, shape.M),
             initial_v = pad_state(call.state_v, true, shape.V, shape.M);
  kernels::GatedDkv dkv_arguments;
  dkv_arguments.shape = shape;
  dkv_arguments.s = dq_arguments.s, dkv_arguments.g = dq_arguments.g,
  dkv_arguments.w = input<4>(gate_terms.w);
  dkv_arguments.memory[0] = {dq_arguments.k,      dq_arguments.q,       input<4>(dz),  input<4>(dz_scan),
                             input<4>(initial_k), input<4>(dinitial.k), output<4>(dk), shape.D};
  dkv_arguments.memory[1] = {dq_arguments.v,      dq_arguments.dout,    input<4>(p),   input<4>(p_scan),
                             input<4>(initial_v), input<4>(dinitial.v), output<4>(dv), shape.V};
  dkv_arguments.y_scale = 1;
  dkv_arguments.states = states.const_data_ptr();
  dkv_arguments.gradients = gradients.const_data_ptr();
  dkv_arguments.ds = output<4>(ds), dkv_arguments.dg = output<4>(dg);
  GIRIH_LAUNCH(gsa_dkv, dkv_arguments);

  return Gradients{crop_width(dq, a.D),
                   a.sum_head_groups(dk, a.D, call.k),
                   a.sum_head_groups(dv, a.V, call.v),
                   if_defined(call.s, [&] { return a.sum_head_groups(ds, a.M, *call.s); }),
                   a.sum_head_groups(dg, a.M, *call.g),
                   if_defined(call.state_k, [&] { return crop_state(dinitial.k, a.D, a.M); }),
                   if_defined(call.state_v, [&] { return crop_state(dinitial.v.mT(), a.M, a.V); }),
                   std::nullopt,
                   std::nullopt};
}

std::optional<Tensor> step_cuda(const Call& call) {
  Problem::check(call);
  if (Problem::step_path(call) == Path::Code::aten) return std::nullopt;
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto token = [](const OptionalTensor& x) { return is_defined(x) ? x->select(1, 0) : Tensor(); };
  const auto o = at::empty({call.q.size(0), 1, call.q.size(2), call.v.size(3)}, call.q.options());
  kernels::GsaStep p;
  p.sequences = call.q.size(0);
  p.heads = static_cast<int>(call.k.size(2)), p.query_heads = static_cast<int>(call.q.size(2));
  p.D = static_cast<int>(call.q.size(3)), p.V = static_cast<int>(call.v.size(3)),
  p.M = static_cast<int>(call.state_k->size(3));
  p.feature = parse_feature(call.feature);
  p.scale = static_cast<float>(call.query_scale());
  p.q = input<3>(token(call.q)), p.k = input<3>(token(call.k)), p.v = input<3>(token(call.v));
  p.s = input<3>(token(call.s)), p.g = input<3>(token(call.g));
  p.state_k = output<4>(*call.state_k), p.state_v = output<4>(*call.state_v);
  if (is_defined(call.state_z)) p.z = output<3>(*call.state_z);
  p.o = output<3>(o.select(1, 0));
  GIRIH_LAUNCH(gsa_step, p);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  register_explain<Call, Problem, &choose_path>(m);
  register_forward<&forward_cuda>(m);
  register_backward<&backward_cuda>(m);
  register_step<&step_cuda>(m);
}

}  // namespace girih::gsa

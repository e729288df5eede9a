// CUDA implementation of gsa. Tensor cores: 16-bit elements with gates and up to 128 slots. fp32 kernels: the
// other calls. float64: the ATen form.
#include "../gated/gated_kernels.h"
#include "aten.h"
#include "gsa/gsa.h"

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

// The arguments of a call, with the initial states [N, H, D, M] and [N, H, V, M].
struct Arguments : GatedArguments {
  Tensor initial[2];

  Arguments(KernelKind kind, const Call& call, const OptionalTensor& s, int64_t slots)
      : GatedArguments(kind, call.q, call.k, call.v, s, call.g, slots, call.cu_seqlens, call.query_scale(),
                       parse_feature(call.feature)),
        initial{pad_key_state(call.state_k), pad_value_state(call.state_v)} {}

  // [N, H, D, M]
  Tensor pad_key_state(const OptionalTensor& x) const { return pad_state(x, false, shape.D, shape.M); }
  // [N, H, M, V] as [N, H, V, M]
  Tensor pad_value_state(const OptionalTensor& x) const { return pad_state(x, true, shape.V, shape.M); }
  Tensor crop_key_state(const Tensor& x) const { return crop_state(x, D, M); }
  Tensor crop_value_state(const Tensor& x) const { return crop_state(x.mT(), M, V); }

  kernels::GsaInputs plan_inputs() const {
    return {shape,
            input<4>(q),
            input<4>(k),
            input<4>(v),
            input<4>(s),
            input<4>(g),
            {input<4>(initial[0]), input<4>(initial[1])}};
  }
};

// The arguments of the fp32 plans, with the logits and the normaliser of ABC if g is absent.
struct Fp32Arguments : Arguments {
  bool is_abc;
  Tensor logits, initial_z;

  explicit Fp32Arguments(const Call& call)
      : Arguments(KernelKind::fp32, call, slot_weights(call), slots_of(call)), is_abc(!is_defined(call.g)) {
    if (!is_abc) return;
    logits = call.s->to(at::kFloat);
    initial_z = call.state_z.value_or(Tensor());
  }

  Tensor new_z() const {
    return at::empty({shape.tokens.sequences, shape.heads, M}, q.options().dtype(at::kFloat));
  }
  kernels::GsaFp32Inputs plan_inputs() const {
    return {Arguments::plan_inputs(), is_abc, input<4>(logits), input<3>(initial_z)};
  }

 private:
  static int64_t slots_of(const Call& call) { return (is_defined(call.g) ? call.g : call.s)->size(3); }
  // s, or 1 - e^g; absent for ABC.
  static OptionalTensor slot_weights(const Call& call) {
    if (!is_defined(call.g)) return std::nullopt;
    return is_defined(call.s) ? call.s : call.g->to(at::kFloat).expm1().neg_();
  }
};

Results forward_fp32(const Call& call, const Problem& problem, bool save) {
  const Fp32Arguments a(call);
  const auto& shape = a.shape;
  const auto last_k = a.new_end_states(shape.D), last_v = a.new_end_states(shape.V),
             last_z = a.is_abc ? a.new_z() : Tensor(),
             o = a.new_rows(shape.query_heads, shape.V, call.q.scalar_type());
  kernels::GsaFp32Forward p{};
  p.inputs = a.plan_inputs();
  p.final[0] = output<4>(last_k), p.final[1] = output<4>(last_v), p.final_z = output<3>(last_z);
  p.o = output<4>(o);
  GIRIH_RUN(gsa_fp32_forward, p, a.q);
  return {crop_width(o, a.V), a.crop_key_state(last_k), a.crop_value_state(last_v),
          a.is_abc ? OptionalTensor(last_z) : std::nullopt,
          new_saved(problem.saved(call, save), call.q.options())};
}

Gradients backward_fp32(const Call& call, const OutputGradients& grads) {
  const Fp32Arguments a(call);
  const auto& shape = a.shape;
  const auto type = call.q.scalar_type();
  const auto dout = align_output_gradient(grads.o, call.q, shape.query_heads, shape.V, type);
  const auto dfinal_k = a.pad_key_state(grads.k), dfinal_v = a.pad_value_state(grads.v);
  const bool has_s = is_defined(call.s), has_state = is_defined(call.state_k);
  const auto new_slot_rows = [&](int64_t M) { return a.new_rows(shape.heads, M, at::kFloat); };
  const auto dq = a.new_rows(shape.query_heads, shape.D, type), dk = a.new_rows(shape.heads, shape.D, type),
             dv = a.new_rows(shape.heads, shape.V, type),
             ds = has_s && !a.is_abc ? new_slot_rows(shape.M) : Tensor(),
             dg = a.is_abc ? Tensor() : new_slot_rows(shape.M),
             dlogits = a.is_abc ? new_slot_rows(a.M) : Tensor(),
             dinitial_k = has_state ? a.new_end_states(shape.D) : Tensor(),
             dinitial_v = has_state ? a.new_end_states(shape.V) : Tensor();
  const auto dinitial_z = if_defined(call.state_z, [&] { return a.new_z(); });
  kernels::GsaFp32Backward p{};
  p.inputs = a.plan_inputs();
  p.is_s_derived = !has_s;
  p.dout = input<4>(dout);
  p.dfinal[0] = input<4>(dfinal_k), p.dfinal[1] = input<4>(dfinal_v), p.dfinal_z = input<3>(grads.z);
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
  p.ds = output<4>(ds), p.dg = output<4>(dg), p.dlogits = output<4>(dlogits);
  p.dinitial[0] = output<4>(dinitial_k), p.dinitial[1] = output<4>(dinitial_v);
  if (dinitial_z) p.dinitial_z = output<3>(*dinitial_z);
  GIRIH_RUN(gsa_fp32_backward, p, a.q);

  return {crop_width(dq, a.D),
          crop_width(dk, a.D),
          crop_width(dv, a.V),
          if_defined(call.s,
                     [&] { return (a.is_abc ? dlogits : crop_width(ds, a.M)).to(call.s->scalar_type()); }),
          if_defined(call.g, [&] { return crop_width(dg, a.M).to(call.g->scalar_type()); }),
          if_defined(call.state_k, [&] { return a.crop_key_state(dinitial_k); }),
          if_defined(call.state_v, [&] { return a.crop_value_state(dinitial_v); }),
          dinitial_z,
          std::nullopt};
}

Results forward_tensor_cores(const Call& call, bool save) {
  const Arguments a(KernelKind::tensor, call, call.s, call.g->size(3));
  const auto& shape = a.shape;
  const auto states = save ? a.new_states() : Tensor();
  const auto last_k = a.new_end_states(shape.D), last_v = a.new_end_states(shape.V),
             o = a.new_rows(shape.query_heads, shape.V, call.q.scalar_type());
  kernels::GsaForward p{};
  p.inputs = a.plan_inputs();
  p.final[0] = output<4>(last_k), p.final[1] = output<4>(last_v), p.o = output<4>(o);
  if (save) p.states = states.mutable_data_ptr();
  GIRIH_RUN(gsa_forward, p, a.q);
  return {crop_width(o, a.V), a.crop_key_state(last_k), a.crop_value_state(last_v), std::nullopt,
          save ? states : at::empty({0}, call.q.options())};
}

Gradients backward_tensor_cores(const Call& call, const OutputGradients& grads, const Tensor& states) {
  const Arguments a(KernelKind::tensor, call, call.s, call.g->size(3));
  const auto& shape = a.shape;
  const auto HQ = shape.query_heads;
  const auto type = call.q.scalar_type(), partial_type = a.partial_type();
  const auto dout = align_output_gradient(grads.o, call.q, HQ, shape.V, type);
  const auto dfinal_k = a.pad_key_state(grads.k), dfinal_v = a.pad_value_state(grads.v);
  const bool has_state = is_defined(call.state_k);
  const auto dq = a.new_rows(HQ, shape.D, type), dk = a.new_rows(HQ, shape.D, partial_type),
             dv = a.new_rows(HQ, shape.V, partial_type),
             ds = a.s.defined() ? a.new_rows(HQ, shape.M, partial_type) : Tensor(),
             dg = a.new_rows(HQ, shape.M, at::kFloat),
             dinitial_k = has_state ? a.new_end_states(shape.D) : Tensor(),
             dinitial_v = has_state ? a.new_end_states(shape.V) : Tensor();
  kernels::GsaBackward p{};
  p.inputs = a.plan_inputs();
  p.states = states.const_data_ptr();
  p.dout = input<4>(dout);
  p.dfinal[0] = input<4>(dfinal_k), p.dfinal[1] = input<4>(dfinal_v);
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
  p.ds = output<4>(ds), p.dg = output<4>(dg);
  p.dinitial[0] = output<4>(dinitial_k), p.dinitial[1] = output<4>(dinitial_v);
  GIRIH_RUN(gsa_backward, p, a.q);

  return {crop_width(dq, a.D),
          a.sum_head_groups(dk, a.D, call.k),
          a.sum_head_groups(dv, a.V, call.v),
          if_defined(call.s, [&] { return a.sum_head_groups(ds, a.M, *call.s); }),
          a.sum_head_groups(dg, a.M, *call.g),
          if_defined(call.state_k, [&] { return a.crop_key_state(dinitial_k); }),
          if_defined(call.state_v, [&] { return a.crop_value_state(dinitial_v); }),
          std::nullopt,
          std::nullopt};
}

Results forward_cuda(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return WithoutTF32<&forward>::call(call, save);
  if (path == Path::Code::fp32) return forward_fp32(call, problem, save);
  return forward_tensor_cores(call, save);
}

std::optional<Gradients> backward_cuda(const Call& call, const OutputGradients& grads,
                                       const SavedTensors& saved) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return std::nullopt;
  if (path == Path::Code::fp32) return backward_fp32(call, grads);
  check_saved_tensor("gsa", "states", saved.states, problem.saved(call, true), call.q.scalar_type());
  return backward_tensor_cores(call, grads, saved.states);
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

// CUDA implementation of gla. Tensor cores: 16-bit elements, with one gate per head or none and keys of up to
// 256 channels, or with one gate per channel and keys of up to 128. fp32 kernels: the other calls. float64:
// the ATen form.
#include "../arguments/shared_heads.h"
#include "../gated/gated_kernels.h"
#include "aten.h"
#include "gla/gla.h"

namespace girih::gla {
namespace {

static_assert(kHeadGateLimits.columns == kernels::kHeadMaxKeys && kChunkPairTokens == kernels::kHeadPair);

using Gradients = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor>;

// The gradients of the outputs.
struct OutputGradients {
  static auto arguments(auto& g) { return std::tie(g.o, g.s); }
  OptionalTensor o, s;
};

struct SavedTensors {
  static auto arguments(auto& saved) { return std::tie(saved.states); }
  Tensor states;
};

Path choose_path(const Problem& problem, const Call& call) {
  const auto path = problem.path(call);
  const auto fits = [&] {
    bool fits = true;
    if (path != Path::Code::tensor_cores) return fits;
    const auto D = static_cast<int>(call.q.size(3));
    if (call.has_channel_gates()) {
      GIRIH_QUERY(gla_fits, D, fits);
    } else {
      GIRIH_QUERY(gla_head_fits, D, fits);
    }
    return fits;
  };
  return restrict_path(path, problem.N, call.q.device(), fits, &fp32);
}

// One gate per channel: expands gates per head, zeros without gates.
Tensor channel_gates(const Tensor& k, const OptionalTensor& g) {
  if (!is_defined(g)) return at::zeros(k.sizes(), k.options().dtype(at::kFloat));
  return g->dim() == 4 ? *g : g->unsqueeze(-1).expand(k.sizes());
}

GatedArguments gated_arguments(KernelKind kind, const Call& call) {
  // These kernels have no shared heads: k has one head per memory, q at least one.
  const auto keys = repeat_heads(call.k, call.v.size(2));
  return {kind,
          repeat_heads(call.q, call.v.size(2)),
          keys,
          call.v,
          std::nullopt,
          channel_gates(keys, call.g),
          keys.size(3),
          call.cu_seqlens,
          call.query_scale(),
          kernels::Feature::none,
          true};
}

// `initial`: the state [N, H, V, M]; `q`: the queries of the plan.
kernels::GlaInputs plan_inputs(const GatedArguments& a, const Tensor& q, const Tensor& initial) {
  return {a.shape, input<4>(q), input<4>(a.k), input<4>(a.v), input<4>(a.g), input<4>(initial)};
}

Results forward_fp32(const Call& call, const Problem& problem, bool save) {
  const auto a = gated_arguments(KernelKind::fp32, call);
  const auto& shape = a.shape;
  const auto q = a.q.to(at::kFloat) * shape.scale;
  const auto initial = pad_state(call.state_s, true, shape.V, shape.M), last = a.new_end_states(shape.V),
             o = a.new_rows(shape.query_heads, shape.V, call.q.scalar_type());
  kernels::GlaFp32Forward p{};
  p.inputs = plan_inputs(a, q, initial);
  p.final = output<4>(last), p.o = output<4>(o);
  GIRIH_RUN(gla_fp32_forward, p, a.q);
  return {crop_width(o, a.V), crop_state(last.mT(), a.M, a.V),
          new_saved(problem.saved(call, save), call.q.options())};
}

Gradients backward_fp32(const Call& call, const OutputGradients& grads) {
  const auto a = gated_arguments(KernelKind::fp32, call);
  const auto& shape = a.shape;
  const auto type = call.q.scalar_type();
  const auto q = a.q.to(at::kFloat) * shape.scale;
  const auto dout = align_output_gradient(grads.o, call.q, shape.query_heads, shape.V, type);
  const auto initial = pad_state(call.state_s, true, shape.V, shape.M),
             dfinal = pad_state(grads.s, true, shape.V, shape.M);
  const bool has_gates = is_defined(call.g);
  const auto dq = a.new_rows(shape.query_heads, shape.M, at::kFloat),
             dk = a.new_rows(shape.heads, shape.M, at::kFloat), dv = a.new_rows(shape.heads, shape.V, type),
             dg = has_gates ? a.new_rows(shape.heads, shape.M, at::kFloat) : Tensor(),
             dinitial = is_defined(call.state_s) ? a.new_end_states(shape.V) : Tensor();
  kernels::GlaFp32Backward p{};
  p.inputs = plan_inputs(a, q, initial);
  p.dout = input<4>(dout), p.dfinal = input<4>(dfinal);
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv), p.dg = output<4>(dg);
  p.dinitial = output<4>(dinitial);
  GIRIH_RUN(gla_fp32_backward, p, a.q);

  const auto gate_gradient = [&] {
    return (call.g->dim() == 4 ? crop_width(dg, a.M) : dg.sum(-1)).to(call.g->scalar_type());
  };
  return {sum_shared_heads(crop_width((dq * shape.scale).to(type), a.M), call.q),
          sum_shared_heads(crop_width(dk.to(type), a.M), call.k),
          crop_width(dv, a.V),
          if_defined(call.g, gate_gradient),
          if_defined(call.state_s, [&] { return crop_state(dinitial.mT(), a.M, a.V); }),
          std::nullopt};
}

// The tensors of one call as the kernels with one gate per head read them.
struct HeadArguments {
  Tensor q, k, v, cu_seqlens;
  kernels::HeadShape shape;

  explicit HeadArguments(const Call& call)
      : q(align_rows(call.q)),
        k(align_rows(call.k)),
        v(align_rows(call.v)),
        cu_seqlens(contiguous_or_undefined(call.cu_seqlens)) {
    const auto H = v.size(2);
    shape = {sequence_layout(q, cu_seqlens),
             static_cast<int>(H),
             static_cast<int>(std::max(q.size(2), H)),
             heads_per_shared_head(k, H),
             heads_per_shared_head(q, H),
             static_cast<int>(k.size(3)),
             static_cast<int>(v.size(3)),
             static_cast<int>(call.k.size(3)),
             static_cast<int>(call.v.size(3)),
             kernel_dtype(q),
             static_cast<float>(call.query_scale()),
             input<3>(call.g)};
  }

  Tensor new_rows(int64_t width, at::ScalarType type) const {
    return girih::new_rows(q, q.size(1), cu_seqlens, shape.query_heads, width, type);
  }
  // The dtype of dk and dv: fp32 if several outputs read one memory and their gradients are summed.
  at::ScalarType partial_type() const {
    return shape.query_heads == shape.heads ? q.scalar_type() : at::ScalarType(at::kFloat);
  }
  // The states before every pair of chunks.
  Tensor new_states() const {
    return at::empty(
        {kernels::token_range_count(shape.tokens, kernels::kHeadPair), shape.heads, shape.V, shape.D},
        q.options());
  }
  // The states at one end of every sequence, [N, heads, D, V].
  Tensor new_end_states(int64_t heads) const {
    return at::empty({shape.tokens.sequences, heads, shape.keys, shape.values},
                     q.options().dtype(at::kFloat));
  }
};

// `initial`: the state [N, H, D, V].
kernels::GlaHeadInputs plan_inputs(const HeadArguments& a, const OptionalTensor& initial) {
  kernels::GlaHeadInputs inputs{a.shape, input<4>(a.q), input<4>(a.k), input<4>(a.v), {}};
  if (is_defined(initial)) inputs.initial = input<4>(initial->mT());
  return inputs;
}

Results forward_head(const Call& call, bool save) {
  const HeadArguments a(call);
  const auto states = save ? a.new_states() : Tensor();
  const auto last = a.new_end_states(a.shape.heads), o = a.new_rows(a.shape.V, call.q.scalar_type());
  kernels::GlaHeadForward p{};
  p.inputs = plan_inputs(a, call.state_s);
  p.final = output<4>(last.mT()), p.o = output<4>(o);
  if (save) p.states = states.mutable_data_ptr();
  GIRIH_RUN(gla_head_forward, p, a.q);
  return {crop_width(o, a.shape.values), last, save ? states : at::empty({0}, call.q.options())};
}

// The gradient of the final state for every query head: the first query head of a memory starts from it, the
// others from zero. The gradients of all heads are summed later.
OptionalTensor split_to_query_heads(const OptionalTensor& dfinal, int64_t group) {
  if (!is_defined(dfinal) || group == 1) return dfinal;
  auto split = at::zeros({dfinal->size(0), dfinal->size(1), group, dfinal->size(2), dfinal->size(3)},
                         dfinal->options());
  split.select(2, 0).copy_(*dfinal);
  return split.flatten(1, 2);
}

Gradients backward_head(const Call& call, const OutputGradients& grads, const Tensor& states) {
  const HeadArguments a(call);
  const auto& shape = a.shape;
  const int64_t H = shape.heads, group = shape.query_heads / H;
  const auto type = call.q.scalar_type();
  const auto dout = align_output_gradient(grads.o, call.q, shape.query_heads, shape.V, type);
  const auto dfinal = split_to_query_heads(grads.s, group);
  const auto dq = a.new_rows(shape.D, type), dk = a.new_rows(shape.D, a.partial_type()),
             dv = a.new_rows(shape.V, a.partial_type());
  const auto dg = if_defined(call.g, [&] { return at::empty(call.g->sizes(), call.g->options()); });
  const auto dinitial = is_defined(call.state_s) ? a.new_end_states(shape.query_heads) : Tensor();
  kernels::GlaHeadBackward p{};
  p.inputs = plan_inputs(a, call.state_s);
  p.states = states.const_data_ptr();
  p.dout = input<4>(dout);
  if (is_defined(dfinal)) p.dfinal = input<4>(dfinal->mT());
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
  if (dg) p.dg = output<3>(*dg);
  if (dinitial.defined()) p.dinitial = output<4>(dinitial.mT());
  GIRIH_RUN(gla_head_backward, p, a.q);

  return {sum_head_groups(dq, call.q.size(2), shape.keys, call.q),
          sum_head_groups(dk, call.k.size(2), shape.keys, call.k),
          sum_head_groups(dv, H, shape.values, call.v),
          dg,
          if_defined(call.state_s,
                     [&] {
                       return group == 1 ? dinitial : dinitial.unflatten(1, {H, group}).sum(2);
                     }),
          std::nullopt};
}

Results forward_channel(const Call& call, bool save) {
  const auto a = gated_arguments(KernelKind::tensor, call);
  const auto& shape = a.shape;
  const auto states = save ? a.new_states() : Tensor();
  const auto initial = pad_state(call.state_s, true, shape.V, shape.M), last = a.new_end_states(shape.V),
             o = a.new_rows(shape.query_heads, shape.V, call.q.scalar_type());
  kernels::GlaForward p{};
  p.inputs = plan_inputs(a, a.q, initial);
  p.final = output<4>(last), p.o = output<4>(o);
  if (save) p.states = states.mutable_data_ptr();
  GIRIH_RUN(gla_forward, p, a.q);
  return {crop_width(o, a.V), crop_state(last.mT(), a.M, a.V),
          save ? states : at::empty({0}, call.q.options())};
}

Gradients backward_channel(const Call& call, const OutputGradients& grads, const Tensor& states) {
  const auto a = gated_arguments(KernelKind::tensor, call);
  const auto& shape = a.shape;
  const auto HQ = shape.query_heads;
  const auto type = call.q.scalar_type();
  const auto dout = align_output_gradient(grads.o, call.q, HQ, shape.V, type);
  const auto initial = pad_state(call.state_s, true, shape.V, shape.M),
             dfinal = pad_state(grads.s, true, shape.V, shape.M);
  const auto dq = a.new_rows(HQ, shape.M, type), dk = a.new_rows(HQ, shape.M, a.partial_type()),
             dv = a.new_rows(HQ, shape.V, a.partial_type()), dg = a.new_rows(HQ, shape.M, at::kFloat),
             dinitial = is_defined(call.state_s) ? a.new_end_states(shape.V) : Tensor();
  kernels::GlaBackward p{};
  p.inputs = plan_inputs(a, a.q, initial);
  p.states = states.const_data_ptr();
  p.dout = input<4>(dout), p.dfinal = input<4>(dfinal);
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv), p.dg = output<4>(dg);
  p.dinitial = output<4>(dinitial);
  GIRIH_RUN(gla_backward, p, a.q);

  return {sum_shared_heads(crop_width(dq, a.M), call.q),
          sum_shared_heads(a.sum_head_groups(dk, a.M, call.k), call.k),
          a.sum_head_groups(dv, a.V, call.v),
          a.sum_head_groups(dg, a.M, *call.g),
          if_defined(call.state_s, [&] { return crop_state(dinitial.mT(), a.M, a.V); }),
          std::nullopt};
}

Results forward_cuda(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return WithoutTF32<&forward>::call(call, save);
  if (path == Path::Code::fp32) return forward_fp32(call, problem, save);
  return call.has_channel_gates() ? forward_channel(call, save) : forward_head(call, save);
}

std::optional<Gradients> backward_cuda(const Call& call, const OutputGradients& grads,
                                       const SavedTensors& saved) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return std::nullopt;
  if (path == Path::Code::fp32) return backward_fp32(call, grads);
  const auto& states = saved.states;
  check_saved_tensor("gla", "states", states, problem.saved(call, true), call.q.scalar_type());
  return call.has_channel_gates() ? backward_channel(call, grads, states)
                                  : backward_head(call, grads, states);
}

std::optional<Tensor> step_cuda(const Call& call) {
  Problem::check(call);
  if (Problem::step_path(call) == Path::Code::aten) return std::nullopt;
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto H = call.v.size(2), HO = std::max(call.q.size(2), H);
  const auto o = at::empty({call.q.size(0), 1, HO, call.v.size(3)}, call.q.options());
  kernels::GlaStep p;
  p.sequences = call.q.size(0);
  p.heads = static_cast<int>(H), p.query_heads = static_cast<int>(HO);
  p.key_share = heads_per_shared_head(call.k, H), p.query_share = heads_per_shared_head(call.q, H);
  p.D = static_cast<int>(call.q.size(3)), p.V = static_cast<int>(call.v.size(3));
  p.scale = static_cast<float>(call.query_scale());
  p.q = input<3>(call.q.select(1, 0)), p.k = input<3>(call.k.select(1, 0)),
  p.v = input<3>(call.v.select(1, 0));
  if (is_defined(call.g)) {
    const auto channel_g =
        call.has_channel_gates() ? *call.g : call.g->unsqueeze(-1).expand({p.sequences, 1, H, p.D});
    p.g = input<3>(channel_g.select(1, 0));
  }
  p.state = output<4>(*call.state_s);
  p.o = output<3>(o.select(1, 0));
  GIRIH_LAUNCH(gla_step, p);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  register_explain<Call, Problem, &choose_path>(m);
  register_forward<&forward_cuda>(m);
  register_backward<&backward_cuda>(m);
  register_step<&step_cuda>(m);
}

}  // namespace girih::gla

// CUDA implementation of gla. Tensor cores: 16-bit elements, with one gate per head or none and keys of up to
// 256 channels, or with one gate per channel and keys of up to 128. fp32 kernels: the other calls. float64:
// the ATen form.
#include "../arguments/shared_heads.h"
#include "../gated/gated_fp32.h"
#include "aten.h"
#include "gla/gla.h"
#include "gla/head.h"

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
      GIRIH_QUERY(gsa_fits, D, fits);  // the gla kernels need less shared memory than those of gsa
    } else {
      GIRIH_QUERY(head_fits, D, fits);
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
          call.cu_seqlens,
          call.query_scale(),
          kernels::Feature::none,
          true};
}

Results forward_fp32(const Call& call, const Problem& problem, bool save) {
  const auto a = gated_arguments(KernelKind::fp32, call);
  const auto& shape = a.shape;
  const auto states = a.new_states();
  const auto last =
      gated_scan(a, false, {}, {}, a.v, a.k, {}, pad_state(call.state_s, true, shape.V, shape.M), states);
  const auto p = a.q.to(at::kFloat) * shape.scale;
  return {crop_width(Fp32Reads(a, states, false).key(p, a.k, a.v, 0), a.V), crop_state(last.v.mT(), a.M, a.V),
          new_saved(problem.saved(call, save), call.q.options())};
}

Gradients backward_fp32(const Call& call, const OutputGradients& grads) {
  const auto a = gated_arguments(KernelKind::fp32, call);
  const auto& shape = a.shape;
  const auto type = call.q.scalar_type();
  const auto dout = align_output_gradient(grads.o, call.q, shape.query_heads, shape.V, type);

  // Computes the states again: in fp32 they would be the largest saved tensor.
  const auto states = a.new_states();
  const auto last =
      gated_scan(a, false, {}, {}, a.v, a.k, {}, pad_state(call.state_s, true, shape.V, shape.M), states);

  const auto p = a.q.to(at::kFloat) * shape.scale;
  const auto dp = Fp32Reads(a, states, false).value({{dout, a.v, a.k, 0}});

  const auto gradients = a.new_states();
  const auto dinitial =
      gated_scan(a, true, {}, {}, dout, p, {}, pad_state(grads.s, true, shape.V, shape.M), gradients);
  const Fp32Reads writes(a, gradients, true);
  const auto dk = writes.value({{a.v, dout, p, 0}});
  const auto dv = writes.key(a.k, p, dout, 0);

  OptionalTensor gates;
  if (is_defined(call.g)) {
    const auto dg =
        fp32_gate_gradient(a, p * dp, a.k.to(at::kFloat), dk, false, states, gradients, last, dinitial);
    gates = (call.g->dim() == 4 ? crop_width(dg, a.M) : dg.sum(-1)).to(call.g->scalar_type());
  }
  return {sum_shared_heads(crop_width((dp * shape.scale).to(type), a.M), call.q),
          sum_shared_heads(crop_width(dk.to(type), a.M), call.k),
          crop_width(dv, a.V),
          gates,
          if_defined(call.state_s, [&] { return crop_state(dinitial.v.mT(), a.M, a.V); }),
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
  Tensor new_states(int64_t heads) const {
    return at::empty({kernels::token_range_count(shape.tokens, kernels::kHeadPair), heads, shape.V, shape.D},
                     q.options());
  }
};

// Runs head_read; `initial` and the returned state are [N, heads, D, V].
Tensor head_read(const HeadArguments& a, kernels::HeadRead p, const OptionalTensor& initial, const Tensor& o,
                 const Tensor& states) {
  const auto options = a.q.options().dtype(at::kFloat);
  const auto heads = p.reverse ? a.shape.query_heads : a.shape.heads;
  const auto last = at::empty({a.shape.tokens.sequences, heads, a.shape.keys, a.shape.values}, options);
  p.shape = a.shape;
  if (is_defined(initial)) p.initial = input<4>(initial->mT());
  p.final = output<4>(last.mT());
  p.o = output<4>(o);
  if (states.defined()) p.states = states.mutable_data_ptr();
  const auto workspace = at::empty({kernels::head_read_workspace(p)}, options.dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  GIRIH_LAUNCH(head_read, p);
  return last;
}

Results forward_head(const Call& call, bool save) {
  const HeadArguments a(call);
  const auto states = save ? a.new_states(a.shape.heads) : Tensor();
  const auto o = a.new_rows(a.shape.V, call.q.scalar_type());
  kernels::HeadRead p{};
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(a.v);
  const auto last = head_read(a, p, call.state_s, o, states);
  return {crop_width(o, a.shape.values), last, save ? states : at::empty({0}, call.q.options())};
}

Gradients backward_head(const Call& call, const OutputGradients& grads, const Tensor& states) {
  const HeadArguments a(call);
  const auto& shape = a.shape;
  const int64_t H = shape.heads, group = shape.query_heads / H;
  const auto type = call.q.scalar_type();
  const auto dout = align_output_gradient(grads.o, call.q, shape.query_heads, shape.V, type);

  // Only the first query head of a memory starts from the gradient of the final state; the gradients of all
  // heads are summed later.
  OptionalTensor dfinal = grads.s;
  if (is_defined(grads.s) && group > 1) {
    dfinal = at::zeros({grads.s->size(0), H, group, shape.keys, shape.values}, grads.s->options());
    dfinal->select(2, 0).copy_(*grads.s);
    dfinal = dfinal->flatten(1, 2);
  }
  const auto dv = a.new_rows(shape.V, a.partial_type());
  const auto gradients = a.new_states(shape.query_heads);
  kernels::HeadRead reverse{};
  reverse.reverse = true;
  reverse.q = input<4>(a.k), reverse.k = input<4>(a.q), reverse.v = input<4>(dout);
  const auto dinitial = head_read(a, reverse, dfinal, dv, gradients);

  const auto dq = a.new_rows(shape.D, type), dk = a.new_rows(shape.D, a.partial_type());
  kernels::HeadGradients p;
  p.shape = shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(a.v), p.dout = input<4>(dout);
  p.states = states.const_data_ptr();
  p.gradients = gradients.const_data_ptr();
  if (is_defined(call.state_s)) p.initial = input<4>(call.state_s->mT());
  p.dinitial = input<4>(dinitial.mT());
  p.dq = output<4>(dq), p.dk = output<4>(dk);
  GIRIH_QUERY(head_gradient_tile, shape.D, p.tile);
  OptionalTensor dg;
  Tensor dg_partials, partner_gate_terms;
  if (is_defined(call.g)) {
    dg = at::empty(call.g->sizes(), call.g->options());
    dg_partials = a.new_rows(p.tiles(), at::kFloat);
    partner_gate_terms =
        at::empty({kernels::token_range_count(shape.tokens, kernels::kChunk), shape.query_heads, p.tiles()},
                  dg_partials.options());
    p.dg = output<3>(*dg);
    p.dg_parts = dg_partials.mutable_data_ptr<float>(),
    p.partner_gate_terms = partner_gate_terms.mutable_data_ptr<float>();
  }
  GIRIH_LAUNCH(head_gradients, p);

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

Results forward_cuda(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return WithoutTF32<&forward>::call(call, save);
  if (path == Path::Code::fp32) return forward_fp32(call, problem, save);
  if (!call.has_channel_gates()) return forward_head(call, save);
  const auto a = gated_arguments(KernelKind::tensor, call);
  const auto& shape = a.shape;
  const auto states = a.new_states();
  const auto last =
      gated_scan(a, false, {}, {}, a.v, a.k, {}, pad_state(call.state_s, true, shape.V, shape.M), states);
  const auto o = a.new_rows(shape.query_heads, shape.V, call.q.scalar_type());
  kernels::GlaOutput p;
  p.shape = shape;
  p.q = input<4>(a.q), p.k = input<4>(a.k), p.v = input<4>(a.v), p.g = input<4>(a.g);
  p.states = states.const_data_ptr();
  p.o = output<4>(o);
  GIRIH_LAUNCH(gla_output, p);
  return {crop_width(o, a.V), crop_state(last.v.mT(), a.M, a.V),
          save ? states : at::empty({0}, call.q.options())};
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
  if (!call.has_channel_gates()) return backward_head(call, grads, states);
  const auto a = gated_arguments(KernelKind::tensor, call);
  const auto& shape = a.shape;
  const auto HQ = shape.query_heads;
  const auto type = call.q.scalar_type();
  const auto dout = align_output_gradient(grads.o, call.q, HQ, shape.V, type);

  const auto dq = a.new_rows(HQ, shape.M, type), q_scan = a.new_rows(HQ, shape.M, type);
  const GateGradientBuffers gate_terms(a);
  kernels::GlaDq dq_arguments;
  dq_arguments.shape = shape;
  dq_arguments.q = input<4>(a.q), dq_arguments.k = input<4>(a.k), dq_arguments.v = input<4>(a.v),
  dq_arguments.g = input<4>(a.g);
  dq_arguments.states = states.const_data_ptr();
  dq_arguments.dout = input<4>(dout);
  dq_arguments.dq = output<4>(dq), dq_arguments.q_scan = output<4>(q_scan),
  dq_arguments.gate_terms = gate_terms.arrays();
  GIRIH_LAUNCH(gla_dq, dq_arguments);

  const auto gradients = a.new_states();
  const auto dinitial =
      gated_scan(a, true, {}, {}, dout, q_scan, {}, pad_state(grads.s, true, shape.V, shape.M), gradients,
                 gate_terms.factored_data());

  // Several query heads of one memory write partial gradients in fp32, which are summed later.
  const auto partial_type = a.group() == 1 ? type : at::kFloat;
  const auto dk = a.new_rows(HQ, shape.M, partial_type), dv = a.new_rows(HQ, shape.V, partial_type),
             dg = a.new_rows(HQ, shape.M, at::kFloat);
  const auto initial = pad_state(call.state_s, true, shape.V, shape.M);
  kernels::GatedDkv dkv_arguments;
  dkv_arguments.shape = shape;
  dkv_arguments.s = dq_arguments.k, dkv_arguments.g = dq_arguments.g,
  dkv_arguments.w = input<4>(gate_terms.w);
  dkv_arguments.memory[1] = {dq_arguments.v,    dq_arguments.dout,    dq_arguments.q, input<4>(q_scan),
                             input<4>(initial), input<4>(dinitial.v), output<4>(dv),  shape.V};
  dkv_arguments.y_scale = shape.scale;
  dkv_arguments.states = states.const_data_ptr();
  dkv_arguments.gradients = gradients.const_data_ptr();
  dkv_arguments.ds = output<4>(dk), dkv_arguments.dg = output<4>(dg);
  GIRIH_LAUNCH(gla_dkv, dkv_arguments);

  return Gradients{sum_shared_heads(crop_width(dq, a.M), call.q),
                   sum_shared_heads(a.sum_head_groups(dk, a.M, call.k), call.k),
                   a.sum_head_groups(dv, a.V, call.v),
                   a.sum_head_groups(dg, a.M, *call.g),
                   if_defined(call.state_s, [&] { return crop_state(dinitial.v.mT(), a.M, a.V); }),
                   std::nullopt};
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

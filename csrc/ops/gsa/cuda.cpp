// gsa by its kernels: 16-bit elements, up to 128 slots. The ATen form serves the rest.
#include <ATen/MemoryOverlap.h>

#include "../dispatch.h"
#include "../kernel_arguments.h"
#include "../packs.h"
#include "aten.h"
#include "gsa/gsa.h"
#include "problem.h"

namespace girih::gsa {
namespace {

using Gradients = std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

// ABC's gates (g is None) come from running sums of its logits, whose gradients cancel to less than the
// kernels' 16-bit products keep.
bool has_kernel(const Tensor& q, const Tensor& v, const OptionalTensor& g, const c10::SymInt& sequences) {
  if (!given(g) || (q.scalar_type() != at::kHalf && q.scalar_type() != at::kBFloat16) ||
      g->size(3) > kernels::kGsaMaxSlots || q.size(3) > kernels::kGsaMaxWidth ||
      v.size(3) > kernels::kGsaMaxWidth || sequences == 0) {
    return false;
  }
  bool fits = false;
  check_launch("gsa_fits", kernels::gsa_fits(static_cast<int>(g->size(3)), fits));
  return fits;
}

kernels::Feature feature_of(std::string_view name) {
  if (name == "none") return kernels::Feature::none;
  if (name == "silu") return kernels::Feature::silu;
  if (name == "relu") return kernels::Feature::relu;
  if (name == "relu2") return kernels::Feature::relu2;
  return kernels::Feature::softmax;
}

// One call's tensors as the kernels read them: rows in packs of 16 bytes, s in q's dtype, g in fp32.
struct Arguments {
  Tensor q, k, v, s, g, cu_seqlens;
  kernels::GsaShape shape;
  int64_t D, V, M;

  Arguments(const Tensor& q_, const Tensor& k_, const Tensor& v_, const OptionalTensor& s_, const Tensor& g_,
            const OptionalTensor& cu, const std::optional<double>& scale, std::string_view feature)
      : q(in_packs(q_)),
        k(in_packs(k_)),
        v(in_packs(v_)),
        g(in_packs(g_.to(at::kFloat), 8)),
        D(q_.size(3)),
        V(v_.size(3)),
        M(g_.size(3)) {
    if (given(s_)) s = in_packs(s_->to(q.scalar_type()));
    if (given(cu)) cu_seqlens = cu->contiguous();
    shape = {kernel_tokens(q, cu_seqlens), static_cast<int>(k.size(2)),
             static_cast<int>(q.size(2)),  static_cast<int>(q.size(3)),
             static_cast<int>(v.size(3)),  static_cast<int>(g.size(3)),
             static_cast<int>(M),          kernel_dtype(q),
             feature_of(feature),          static_cast<float>(scale.value_or(1 / std::sqrt(double(D))))};
  }

  int group() const { return shape.query_heads / shape.heads; }
  int64_t sequences() const { return shape.tokens.sequences; }

  // [B, T, heads, width] for the kernels to write. Tokens that no sequence owns stay zero.
  Tensor rows(int64_t heads, int64_t width, at::ScalarType type) const {
    const auto options = q.options().dtype(type);
    return cu_seqlens.defined() ? at::zeros({q.size(0), q.size(1), heads, width}, options)
                                : at::empty({q.size(0), q.size(1), heads, width}, options);
  }
  Tensor states() const {
    return at::empty(
        {kernels::piece_count(shape.tokens, kernels::kChunk), shape.heads, shape.D + shape.V, shape.M},
        q.options());
  }
};

// A state as the scan takes it, [N, H, width, M] in packs; transposed: given as [N, H, M, width].
Tensor padded_state(const OptionalTensor& state, bool transposed, int64_t width, int64_t M) {
  if (!given(state)) return Tensor();
  const auto rows = transposed ? state->mT() : *state;
  if (rows.size(2) == width && rows.size(3) == M) return rows;
  return at::constant_pad_nd(rows, {0, M - rows.size(3), 0, width - rows.size(2)});
}

// Runs a scan; `first` and the returned states are [N, H, width, M].
struct Finals {
  Tensor k, v;
};
Finals scan(const Arguments& a, bool reverse, const Tensor& x0, const Tensor& s0, const Tensor& x1,
            const Tensor& s1, const Tensor& first_k, const Tensor& first_v, const Tensor& states) {
  const auto& shape = a.shape;
  const auto options = a.q.options().dtype(at::kFloat);
  const Finals last{at::empty({a.sequences(), shape.heads, shape.D, shape.M}, options),
                    at::empty({a.sequences(), shape.heads, shape.V, shape.M}, options)};
  kernels::GatedScan p;
  p.tokens = shape.tokens;
  p.heads = shape.heads;
  p.group = reverse ? a.group() : 1;
  p.M = shape.M;
  p.dtype = shape.dtype;
  p.reverse = reverse;
  p.g = input<4>(a.g);
  p.memory[0] = {input<4>(x0), input<4>(s0), input<4>(first_k), output<4>(last.k), shape.D};
  p.memory[1] = {input<4>(x1), input<4>(s1), input<4>(first_v), output<4>(last.v), shape.V};
  p.states = states.mutable_data_ptr();
  const auto workspace = at::empty({kernels::gated_scan_workspace(p)}, options.dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  check_launch("gated_scan", kernels::gated_scan(p, c10::cuda::getCurrentCUDAStream()));
  return last;
}

Tensor cut(const Tensor& padded, int64_t rows, int64_t cols) {
  return padded.narrow(-2, 0, rows).narrow(-1, 0, cols).contiguous();
}

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                     const OptionalTensor& g, const OptionalTensor& state_k, const OptionalTensor& state_v,
                     const OptionalTensor& state_z, const OptionalTensor& cu_seqlens,
                     std::optional<double> scale, std::string_view feature, bool save) {
  const auto problem = Problem::check(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, feature);
  const c10::cuda::CUDAGuard device(q.device());
  if (!has_kernel(q, v, g, problem.N)) {
    at::NoTF32Guard exact;
    return forward(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, scale, feature, save);
  }
  const Arguments a(q, k, v, s, *g, cu_seqlens, scale, feature);
  const auto& shape = a.shape;
  const auto states = a.states();
  const auto last = scan(a, false, a.k, a.s, a.v, a.s, padded_state(state_k, false, shape.D, shape.M),
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
  const auto problem = Problem::check(q, k, v, s, g, state_k, state_v, state_z, cu_seqlens, feature);
  const c10::cuda::CUDAGuard device(q.device());
  if (!has_kernel(q, v, g, problem.N)) {
    // gsa has no backward of its own on the CPU: this is what serves every device without one, autograd of
    // the ATen form.
    static const auto op = find("gsa_backward").typed<decltype(backward_cuda)>();
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), grad_o, grad_k, grad_v, grad_z, q, k, v,
                         s, g, state_k, state_v, state_z, cu_seqlens, states, scale, feature);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();

  const Arguments a(q, k, v, s, *g, cu_seqlens, scale, feature);
  const auto& shape = a.shape;
  const auto kept = problem.saved(q, g, cu_seqlens, true);
  GIRIH_CHECK(states.sym_sizes().equals(kept) && states.scalar_type() == q.scalar_type(),
              "gsa_backward: states is what gsa_forward kept with save=True, of shape ",
              c10::SymIntArrayRef(kept), "; it has shape ", states.sym_sizes());
  const auto HQ = shape.query_heads, H = shape.heads, group = a.group();
  const auto type = q.scalar_type();
  const auto dout = given(grad_o) ? in_packs(grad_o->to(type)) : a.rows(HQ, shape.V, type).zero_();

  const auto dq = a.rows(HQ, shape.D, type), p = a.rows(HQ, shape.M, type), dz = a.rows(HQ, shape.M, type),
             w = a.rows(HQ, shape.M, at::kFloat);
  kernels::GsaRows rows;
  rows.shape = shape;
  rows.q = input<4>(a.q), rows.k = input<4>(a.k), rows.v = input<4>(a.v), rows.s = input<4>(a.s);
  rows.g = input<4>(a.g);
  rows.states = states.const_data_ptr();
  rows.dout = input<4>(dout);
  auto p_scan = a.rows(HQ, shape.M, type), dz_scan = a.rows(HQ, shape.M, type);
  rows.dq = output<4>(dq), rows.p = output<4>(p), rows.dz = output<4>(dz), rows.w = output<4>(w);
  rows.p_scan = output<4>(p_scan), rows.dz_scan = output<4>(dz_scan);
  check_launch("gsa_rows", kernels::gsa_rows(rows, stream));

  const auto gradients = a.states();
  const auto start = scan(a, true, a.q, dz_scan, dout, p_scan, padded_state(grad_k, false, shape.D, shape.M),
                          padded_state(grad_v, true, shape.V, shape.M), gradients);

  p_scan = dz_scan = Tensor();

  // Several query heads of one memory: each gives its part in fp32.
  const auto part = group == 1 ? type : at::kFloat;
  const auto dk = a.rows(HQ, shape.D, part), dv = a.rows(HQ, shape.V, part),
             dg = a.rows(HQ, shape.M, at::kFloat);
  const auto ds = a.s.defined() ? a.rows(HQ, shape.M, part) : Tensor();
  kernels::GsaColumns columns;
  columns.shape = shape;
  columns.q = rows.q, columns.k = rows.k, columns.v = rows.v, columns.s = rows.s, columns.g = rows.g;
  columns.dout = rows.dout;
  columns.p = input<4>(p), columns.dz = input<4>(dz), columns.w = input<4>(w);
  columns.states = states.const_data_ptr();
  columns.gradients = gradients.const_data_ptr();
  const auto initial_k = padded_state(state_k, false, shape.D, shape.M),
             initial_v = padded_state(state_v, true, shape.V, shape.M);
  columns.initial_k = input<4>(initial_k), columns.initial_v = input<4>(initial_v);
  columns.start_k = input<4>(start.k), columns.start_v = input<4>(start.v);
  columns.dk = output<4>(dk), columns.dv = output<4>(dv), columns.ds = output<4>(ds),
  columns.dg = output<4>(dg);
  check_launch("gsa_columns", kernels::gsa_columns(columns, stream));

  const auto gathered = [&](const Tensor& parts, int64_t width, const Tensor& like) {
    auto all = group == 1 ? parts : parts.unflatten(2, {H, group}).sum(3);
    return without_packs(all, width).to(like.scalar_type()).contiguous();
  };
  const auto given_state = [](const OptionalTensor& state, const Tensor& gradient) {
    return given(state) ? OptionalTensor(gradient) : std::nullopt;
  };
  return {without_packs(dq, a.D),
          gathered(dk, a.D, k),
          gathered(dv, a.V, v),
          given(s) ? OptionalTensor(gathered(ds, a.M, *s)) : std::nullopt,
          gathered(dg, a.M, *g),
          given_state(state_k, cut(start.k, a.D, a.M)),
          given_state(state_v, cut(start.v.mT(), a.M, a.V)),
          std::nullopt,
          std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& s,
                 const OptionalTensor& g, const Tensor& state_k, const Tensor& state_v,
                 const OptionalTensor& state_z, std::optional<double> scale, std::string_view feature) {
  Problem::check(q, k, v, s, g, state_k, state_v, state_z, std::nullopt, feature);
  GIRIH_CHECK(q.size(1) == 1, "gsa_step takes one token: q must have T = 1 and has shape ", q.sizes());
  if (q.scalar_type() == at::kDouble) {
    static const auto op = find("gsa_step").typed<decltype(step_cuda)>();
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), q, k, v, s, g, state_k, state_v, state_z,
                         scale, feature);
  }
  at::assert_no_internal_overlap(state_k);
  at::assert_no_internal_overlap(state_v);
  at::assert_no_overlap(state_k, state_v);
  if (given(state_z)) at::assert_no_internal_overlap(*state_z);
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

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("gsa_forward", &forward_cuda);
  m.impl("gsa_backward", &backward_cuda);
  m.impl("gsa_step", &step_cuda);
}

}  // namespace girih::gsa

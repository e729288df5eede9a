// CUDA implementation of delta_product. Tensor cores: 16-bit elements without between_chunks, with one beta
// per step, or with one beta per channel, no gates and no l2norm_qk (vector.h). fp32 kernels (3xtf32): the
// other calls. float64 and wide rows: the ATen form.
#include "../registration/dispatch.h"
#include "arguments.h"
#include "aten.h"
#include "exact.h"
#include "problem.h"
#include "tensor_cores.h"
#include "tile/segments.h"
#include "vector.h"

namespace girih::delta_product {
namespace {

static_assert(kPreparedBytes == kernels::kDeltaPreparedBytes && kKeptChunk == kernels::kDeltaRows &&
              kMostSteps == kernels::kDeltaMaxSteps && kWidest == kernels::kDeltaMaxWidth &&
              kWidestVector == kernels::kDeltaVectorMaxWidth && kStepMost == kernels::kDeltaStepMost &&
              kCard == kernels::kCard);

// The path of the problem, restricted by the shared memory of the device and by the number of sequences.
// The saved tensors are sized by the problem only, so a device with too little shared memory takes the ATen
// form.
Path path_of(const Problem& problem, const Tensor& q, const Tensor& beta, const OptionalTensor& g, int64_t n,
             bool l2norm_qk, const Between& between_chunks) {
  const auto path = problem.path(q, beta, g, n, l2norm_qk, between_chunks);
  if (problem.N == 0) return aten(kNoSequence);
  if (path != Path::Code::tensor_cores) return path;
  bool fits = false;
  check_launch("delta_fits", kernels::delta_fits(static_cast<int>(q.size(3)), beta.dim() == 4, fits));
  return fits ? path : aten(kSmallCard);
}

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                     const OptionalTensor& g, const OptionalTensor& state_s,
                     const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                     std::optional<double> scale, bool l2norm_qk, std::optional<int64_t> chunk,
                     Between between_chunks, bool save) {
  const auto problem = Problem::check(q, k, v, beta, g, state_s, state_position, cu_seqlens, n, scale,
                                      l2norm_qk, chunk, between_chunks);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, beta, g, n, l2norm_qk, between_chunks);
  if (path == Path::Code::exact) {
    const ExactCall call(for_each_head(q, v.size(2)), for_each_head(k, v.size(2)), v, beta, g, state_position,
                         cu_seqlens, n, scale, l2norm_qk, chunk, between_chunks);
    return call.forward(state_s,
                        problem.saved(q, beta, g, cu_seqlens, n, l2norm_qk, chunk, between_chunks, save));
  }
  if (path == Path::Code::aten) {
    at::NoTF32Guard exact;
    return forward(q, k, v, beta, g, state_s, state_position, cu_seqlens, n, scale, l2norm_qk, chunk,
                   between_chunks, save);
  }
  const auto kept = problem.saved(q, beta, g, cu_seqlens, n, l2norm_qk, chunk, between_chunks, save);
  if (beta.dim() == 4) return VectorCall(q, k, v, beta, cu_seqlens, n, scale).forward(state_s, kept);
  const Arguments a(q, k, v, beta, g, cu_seqlens, n, scale, l2norm_qk);
  return run_forward(a, a.v, {}, state_s, kept);
}

Gradients backward_cuda(const OptionalTensor& grad_o, const OptionalTensor& grad_s,
                        const OptionalTensor& grad_position, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& beta, const OptionalTensor& g,
                        const OptionalTensor& state_s, const OptionalTensor& state_position,
                        const OptionalTensor& cu_seqlens, const Tensor& states, const Tensor& prepared,
                        const Tensor& transitions, int64_t n, std::optional<double> scale, bool l2norm_qk,
                        std::optional<int64_t> chunk, Between between_chunks) {
  const auto problem = Problem::check(q, k, v, beta, g, state_s, state_position, cu_seqlens, n, scale,
                                      l2norm_qk, chunk, between_chunks);
  const c10::cuda::CUDAGuard device(q.device());
  const auto path = path_of(problem, q, beta, g, n, l2norm_qk, between_chunks);
  if (path == Path::Code::aten) {
    // Autograd of the ATen form, as on devices without a kernel.
    return run_without_kernel<&backward_cuda>(
        "delta_product_backward", grad_o, grad_s, grad_position, q, k, v, beta, g, state_s, state_position,
        cu_seqlens, states, prepared, transitions, n, scale, l2norm_qk, chunk, between_chunks);
  }
  const auto kept = problem.saved(q, beta, g, cu_seqlens, n, l2norm_qk, chunk, between_chunks, true);
  check_kept("delta_product", "states", states, kept.states, kept.states_type);
  check_kept("delta_product", "prepared", prepared, kept.prepared, kept.prepared_type);
  check_kept("delta_product", "transitions", transitions, kept.transitions, at::kFloat);
  if (path == Path::Code::exact) {
    const ExactCall call(for_each_head(q, v.size(2)), for_each_head(k, v.size(2)), v, beta, g, state_position,
                         cu_seqlens, n, scale, l2norm_qk, chunk, between_chunks);
    auto gradients = call.backward(grad_o, grad_s, state_s, states, prepared);
    auto &dq = std::get<0>(gradients), &dk = std::get<1>(gradients);
    dq = summed_heads(dq, q), dk = summed_heads(dk, k);
    return gradients;
  }
  if (beta.dim() == 4) {
    return VectorCall(q, k, v, beta, cu_seqlens, n, scale)
        .backward(q, k, grad_o, grad_s, state_s, states, prepared, transitions);
  }
  const Arguments a(q, k, v, beta, g, cu_seqlens, n, scale, l2norm_qk);
  const auto& shape = a.shape;
  const auto T = q.size(1), rows = T * n;
  const int64_t H = shape.heads, HO = shape.query_heads;
  const auto type = q.scalar_type();
  // With one output per memory only delta_gradients reads G (dz). dz and dv then share a tensor; depending on
  // the call, reverse has already stored dv.
  const bool alone = H == HO;
  const auto dv = a.rows(rows, H, shape.V, type), dz = alone ? dv : at::empty_like(dv);
  const auto reversed = run_reverse(a, {}, grad_o, grad_s, prepared, transitions, dz, alone);
  const auto& reverse = reversed.p;

  // Several outputs of one memory write partial gradients in fp32, which are summed later.
  const auto dq = a.rows(T, HO, shape.D, type), dk = a.rows(rows, HO, shape.D, alone ? type : at::kFloat),
             dbeta = a.rows(rows, H, 1, at::kFloat).squeeze(-1);
  const auto dg = a.g.defined() ? a.rows(T, HO, 1, at::kFloat).squeeze(-1) : Tensor();
  kernels::DeltaGradients p;
  p.shape = shape;
  p.q = reverse.q, p.k = reverse.k, p.v = input<4>(a.v), p.dout = reverse.dout, p.dz = input<4>(dz);
  p.gated = reverse.gated;
  p.in_place = reverse.in_place;
  p.prepared = reverse.prepared;
  p.factors = reverse.factors;
  p.states = states.const_data_ptr();
  p.gradients = reverse.gradients;
  const auto initial = a.padded(state_s);
  p.initial = input<4>(initial), p.end = reverse.initial;
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
  p.dbeta = output<3>(dbeta), p.dg = output<3>(dg);
  check_launch("delta_gradients", kernels::delta_gradients(p, c10::cuda::getCurrentCUDAStream()));

  return {gathered(dq, q.size(2), a.D, q),
          gathered(dk, k.size(2), a.D, k),
          without_packs(dv, a.V),
          dbeta.to(beta.scalar_type()),
          if_given(g, [&] { return gathered(dg.unsqueeze(-1), H, 1, *g).squeeze(-1); }),
          if_given(state_s, [&] { return cut(reversed.first, a.D, a.V); }),
          std::nullopt,
          std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                 const OptionalTensor& g, const Tensor& state_s, const OptionalTensor& state_position,
                 int64_t n, std::optional<double> scale, bool l2norm_qk, std::optional<int64_t> chunk,
                 Between between_chunks) {
  check_step(describe("delta_product"), q, {state_s, state_position});
  const auto problem = Problem::check(q, k, v, beta, g, state_s, state_position, std::nullopt, n, scale,
                                      l2norm_qk, chunk, between_chunks);
  if (problem.step_path(q, n, between_chunks) == Path::Code::aten) {
    return run_without_kernel<&step_cuda>("delta_product_step", q, k, v, beta, g, state_s, state_position, n,
                                          scale, l2norm_qk, chunk, between_chunks);
  }
  const c10::cuda::CUDAGuard device(q.device());
  const auto H = v.size(2), HO = std::max(q.size(2), H);
  const auto o = at::empty({q.size(0), 1, HO, v.size(3)}, q.options());
  kernels::DeltaStep p;
  p.sequences = q.size(0);
  p.heads = static_cast<int>(H), p.query_heads = static_cast<int>(HO);
  p.key_share = shared_by(k, H), p.query_share = shared_by(q, H);
  p.D = static_cast<int>(q.size(3)), p.V = static_cast<int>(v.size(3)), p.n = static_cast<int>(n);
  p.unit = l2norm_qk;
  p.scale = static_cast<float>(scale.value_or(1 / std::sqrt(double(p.D))));
  p.q = input<3>(q.select(1, 0));
  p.k = input<4>(k), p.v = input<4>(v);
  p.beta = input<4>(beta.dim() == 4 ? beta : beta.unsqueeze(-1));
  if (given(g)) p.g = input<2>(g->select(1, 0));
  p.state = output<4>(state_s);
  p.o = output<3>(o.select(1, 0));
  check_launch("delta_step", kernels::delta_step(p, c10::cuda::getCurrentCUDAStream()));
  return o;
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                    const OptionalTensor& g, const OptionalTensor& state_s,
                    const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t n,
                    std::optional<double> scale, bool l2norm_qk, std::optional<int64_t> chunk,
                    Between between_chunks, std::string_view device, bool step) {
  const auto p = Problem::check(q, k, v, beta, g, state_s, state_position, cu_seqlens, n, scale, l2norm_qk,
                                chunk, between_chunks);
  const c10::cuda::CUDAGuard guard(q.device());
  return explained(
      step ? p.step_path(q, n, between_chunks) : path_of(p, q, beta, g, n, l2norm_qk, between_chunks),
      device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("delta_product_explain", &explain);
  m.impl("delta_product_forward", &forward_cuda);
  m.impl("delta_product_backward", &backward_cuda);
  m.impl("delta_product_step", &step_cuda);
}

}  // namespace girih::delta_product

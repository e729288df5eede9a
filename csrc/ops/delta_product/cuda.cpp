// CUDA implementation of delta_product. Tensor cores: 16-bit elements without between_chunks, with one beta
// per step, or with one beta per channel, no gates and no l2norm_qk. fp32 kernels (3xtf32): the other calls.
// float64 and wide rows: the ATen form.
#include "fp32.h"
#include "tensor_cores.h"

namespace girih::delta_product {
namespace {

static_assert(kPreparedBytes == kernels::kDeltaPreparedBytes && kChunkTokens == kernels::kDeltaChunkRows &&
              kMaxSteps == kernels::kDeltaMaxSteps && kMaxWidth == kernels::kDeltaMaxWidth &&
              kMaxChannelBetaWidth == kernels::kDeltaChannelBetaMaxWidth &&
              kStepLimit == kernels::kDeltaStepLimit);

// The saved tensors are sized by the problem only, so a device with too little shared memory takes the ATen
// form.
Path choose_path(const Problem& problem, const Call& call) {
  const auto path = problem.path(call);
  const auto fits = [&] {
    bool fits = true;
    if (path == Path::Code::tensor_cores) {
      GIRIH_QUERY(delta_fits, static_cast<int>(call.q.size(3)), call.has_channel_beta(), fits);
    }
    return fits;
  };
  return restrict_path(path, problem.N, call.q.device(), fits, &aten);
}

Results forward_cuda(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return WithoutTF32<&forward>::call(call, save);
  const auto saved_shapes = problem.saved(call, save);
  if (path == Path::Code::fp32) return Fp32Call(call).forward(saved_shapes);
  return run_forward(call, saved_shapes);
}

std::optional<Gradients> backward_cuda(const Call& call, const OutputGradients& grads,
                                       const SavedTensors& saved) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return std::nullopt;
  const auto saved_shapes = problem.saved(call, true);
  check_saved_tensor("delta_product", "states", saved.states, saved_shapes.states, saved_shapes.states_type);
  check_saved_tensor("delta_product", "prepared", saved.prepared, saved_shapes.prepared,
                     saved_shapes.prepared_type);
  check_saved_tensor("delta_product", "transitions", saved.transitions, saved_shapes.transitions, at::kFloat);
  if (path == Path::Code::fp32) return Fp32Call(call).backward(grads, saved);
  return run_backward(call, grads, saved);
}

std::optional<Tensor> step_cuda(const Call& call) {
  const auto problem = Problem::check(call);
  if (problem.step_path(call) == Path::Code::aten) return std::nullopt;
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto H = call.v.size(2), HO = std::max(call.q.size(2), H);
  const auto o = at::empty({call.q.size(0), 1, HO, call.v.size(3)}, call.q.options());
  kernels::DeltaStep p;
  p.sequences = call.q.size(0);
  p.heads = static_cast<int>(H), p.output_heads = static_cast<int>(HO);
  p.key_share = heads_per_shared_head(call.k, H), p.query_share = heads_per_shared_head(call.q, H);
  p.D = static_cast<int>(call.q.size(3)), p.V = static_cast<int>(call.v.size(3)),
  p.n = static_cast<int>(call.n);
  p.unit = call.l2norm_qk;
  p.scale = static_cast<float>(call.query_scale());
  p.q = input<3>(call.q.select(1, 0));
  p.k = input<4>(call.k), p.v = input<4>(call.v);
  p.beta = input<4>(call.has_channel_beta() ? call.beta : call.beta.unsqueeze(-1));
  if (is_defined(call.g)) p.g = input<2>(call.g->select(1, 0));
  p.state = output<4>(*call.state_s);
  p.o = output<3>(o.select(1, 0));
  GIRIH_LAUNCH(delta_step, p);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  register_explain<Call, Problem, &choose_path>(m);
  register_forward<&forward_cuda>(m);
  register_backward<&backward_cuda>(m);
  register_step<&step_cuda>(m);
}

}  // namespace girih::delta_product

// CUDA implementation of trellis, and of its step. Tensor cores: 16-bit elements and memories up to 128 wide.
// fp32 kernels: the other calls. float64 and memories wider than 256: the ATen form.
#include "kernel_calls.h"

namespace girih::trellis {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

Results forward_cuda(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return WithoutTF32<&forward>::call(call, save);
  return to_results(run_forward(path, call, save));
}

std::optional<Gradients> backward_cuda(const Call& call, const OutputGradients& grads,
                                       const SavedTensors& saved) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return std::nullopt;
  check_saved(call.name, problem, call, saved);
  const auto inputs = run_backward(path, call, grads, saved);
  return Gradients{inputs.q,
                   inputs.x[0],
                   inputs.x[1],
                   inputs.a,
                   inputs.gamma,
                   inputs.g,
                   inputs.chunk_start[0],
                   inputs.memory[0],
                   inputs.chunk_start[1],
                   inputs.memory[1],
                   std::nullopt,
                   std::nullopt};
}

std::optional<Tensor> step_cuda(const Call& call) {
  Problem::check(call);
  if (Problem::step_path(call) == Path::Code::aten) return std::nullopt;
  return run_step(call);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  register_explain<Call, Problem, &choose_path>(m);
  register_forward<&forward_cuda>(m);
  register_backward<&backward_cuda>(m);
  register_step<&step_cuda>(m);
}

}  // namespace girih::trellis

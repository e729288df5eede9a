// CUDA implementation of ttt, by the kernels of trellis with one memory. The other calls take the ATen form.
#include "../registration/dispatch.h"
#include "../trellis/route.h"
#include "aten.h"
#include "problem.h"

namespace girih::ttt {
namespace {

using trellis::Call, trellis::path_of;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor>;

Call call_of(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma, const OptionalTensor& g,
             const OptionalTensor& phi_weight, const OptionalTensor& state_first_k,
             const OptionalTensor& state_k, const OptionalTensor& state_position,
             const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi, std::string_view f) {
  return {q,          {k, {}}, a,   gamma, g, phi_weight, {state_first_k, {}}, {state_k, {}}, state_position,
          cu_seqlens, chunk,   phi, f};
}

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                     const OptionalTensor& g, const OptionalTensor& phi_weight,
                     const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                     const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                     std::string_view phi, std::string_view f, bool save) {
  const auto problem = Problem::check(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                                      cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard device(q.device());
  const auto call = call_of(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position, cu_seqlens,
                            chunk, phi, f);
  const auto path = path_of(problem, call);
  if (path == Path::Code::aten) {
    at::NoTF32Guard exact;
    return forward(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position, cu_seqlens, chunk,
                   phi, f, save);
  }
  const auto made = trellis::run_forward(path, call, save);
  const auto& saved = made.saved;
  return {made.o,  made.last_first[0], made.last[0], made.position, saved.memories[0], saved.z,
          saved.u, saved.fit};
}

Gradients backward_cuda(const OptionalTensor& grad_o, const OptionalTensor& grad_first_k,
                        const OptionalTensor& grad_k, const OptionalTensor& grad_position, const Tensor& q,
                        const Tensor& k, const Tensor& a, const Tensor& gamma, const OptionalTensor& g,
                        const OptionalTensor& phi_weight, const OptionalTensor& state_first_k,
                        const OptionalTensor& state_k, const OptionalTensor& state_position,
                        const OptionalTensor& cu_seqlens, const Tensor& memories_k, const Tensor& z,
                        const Tensor& u, const Tensor& fit, int64_t chunk, std::string_view phi,
                        std::string_view f) {
  const auto problem = Problem::check(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                                      cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard device(q.device());
  const auto call = call_of(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position, cu_seqlens,
                            chunk, phi, f);
  const auto path = path_of(problem, call);
  if (path == Path::Code::aten) {
    return run_without_kernel<&backward_cuda>(
        "ttt_backward", grad_o, grad_first_k, grad_k, grad_position, q, k, a, gamma, g, phi_weight,
        state_first_k, state_k, state_position, cu_seqlens, memories_k, z, u, fit, chunk, phi, f);
  }
  const trellis::Saved saved{{memories_k, {}}, z, u, fit};
  trellis::check_saved("ttt", problem, call, saved);
  const auto found = trellis::run_backward(path, call, {grad_o, {grad_first_k, {}}, {grad_k, {}}}, saved);
  return {found.q,          found.x[0],     found.a,          found.gamma,  found.g,
          found.phi_weight, found.first[0], found.initial[0], std::nullopt, std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                 const OptionalTensor& g, const OptionalTensor& phi_weight, const Tensor& state_first_k,
                 const Tensor& state_k, const Tensor& state_position, int64_t chunk, std::string_view phi,
                 std::string_view f) {
  check_step(describe("ttt"), q, {state_first_k, state_k, state_position});
  Problem::check(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position, std::nullopt, chunk,
                 phi, f);
  if (Problem::step_path(q) == Path::Code::aten) {
    return run_without_kernel<&step_cuda>("ttt_step", q, k, a, gamma, g, phi_weight, state_first_k, state_k,
                                          state_position, chunk, phi, f);
  }
  return trellis::run_step(call_of(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                                   std::nullopt, chunk, phi, f));
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                    const OptionalTensor& g, const OptionalTensor& phi_weight,
                    const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                    const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                    std::string_view phi, std::string_view f, std::string_view device, bool step) {
  const auto problem = Problem::check(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                                      cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard guard(q.device());
  const auto call = call_of(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position, cu_seqlens,
                            chunk, phi, f);
  return explained(step ? Problem::step_path(q) : path_of(problem, call), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("ttt_explain", &explain);
  m.impl("ttt_forward", &forward_cuda);
  m.impl("ttt_backward", &backward_cuda);
  m.impl("ttt_step", &step_cuda);
}

}  // namespace girih::ttt

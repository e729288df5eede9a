// CUDA implementation of ttt, by the kernels of trellis with one memory. The other calls take the ATen form.
#include "../registration/dispatch.h"
#include "../trellis/route.h"
#include "aten.h"
#include "problem.h"

namespace girih::ttt {
namespace {

using trellis::CallArguments, trellis::choose_path;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor>;

CallArguments make_call(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                        const OptionalTensor& g, const OptionalTensor& phi_weight,
                        const OptionalTensor& state_first_k, const OptionalTensor& state_k,
                        const OptionalTensor& state_position, const OptionalTensor& cu_seqlens, int64_t chunk,
                        std::string_view phi, std::string_view f) {
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
  const auto call = make_call(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                              cu_seqlens, chunk, phi, f);
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) {
    at::NoTF32Guard no_tf32;
    return forward(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position, cu_seqlens, chunk,
                   phi, f, save);
  }
  const auto outputs = trellis::run_forward(path, call, save);
  const auto& saved = outputs.saved;
  return {outputs.o,         outputs.last_first[0],
          outputs.last[0],   outputs.position,
          saved.memories[0], saved.z,
          saved.u,           saved.fit};
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
  const auto call = make_call(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                              cu_seqlens, chunk, phi, f);
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) {
    return redispatch_to_aten<&backward_cuda>(
        "ttt_backward", grad_o, grad_first_k, grad_k, grad_position, q, k, a, gamma, g, phi_weight,
        state_first_k, state_k, state_position, cu_seqlens, memories_k, z, u, fit, chunk, phi, f);
  }
  const trellis::SavedTensors saved{{memories_k, {}}, z, u, fit};
  trellis::check_saved("ttt", problem, call, saved);
  const auto input_gradients =
      trellis::run_backward(path, call, {grad_o, {grad_first_k, {}}, {grad_k, {}}}, saved);
  return {input_gradients.q,
          input_gradients.x[0],
          input_gradients.a,
          input_gradients.gamma,
          input_gradients.g,
          input_gradients.phi_weight,
          input_gradients.first[0],
          input_gradients.initial[0],
          std::nullopt,
          std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& a, const Tensor& gamma,
                 const OptionalTensor& g, const OptionalTensor& phi_weight, const Tensor& state_first_k,
                 const Tensor& state_k, const Tensor& state_position, int64_t chunk, std::string_view phi,
                 std::string_view f) {
  check_step(get_operator("ttt"), q, {state_first_k, state_k, state_position});
  Problem::check(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position, std::nullopt, chunk,
                 phi, f);
  if (Problem::step_path(q) == Path::Code::aten) {
    return redispatch_to_aten<&step_cuda>("ttt_step", q, k, a, gamma, g, phi_weight, state_first_k, state_k,
                                          state_position, chunk, phi, f);
  }
  return trellis::run_step(make_call(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
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
  const auto call = make_call(q, k, a, gamma, g, phi_weight, state_first_k, state_k, state_position,
                              cu_seqlens, chunk, phi, f);
  return explain_path(step ? Problem::step_path(q) : choose_path(problem, call), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("ttt_explain", &explain);
  m.impl("ttt_forward", &forward_cuda);
  m.impl("ttt_backward", &backward_cuda);
  m.impl("ttt_step", &step_cuda);
}

}  // namespace girih::ttt

// CUDA implementation of trellis, and of its step. Tensor cores: 16-bit elements and memories up to 128 wide.
// fp32 kernels: the other calls. float64 and memories wider than 256: the ATen form.
#include "../registration/dispatch.h"
#include "aten.h"
#include "route.h"

namespace girih::trellis {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, OptionalTensor, OptionalTensor,
                             OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                     const OptionalTensor& g, const OptionalTensor& state_first_k,
                     const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                     const OptionalTensor& state_v, const OptionalTensor& state_position,
                     const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi,
                     std::string_view f, bool save) {
  const auto problem = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                      state_position, cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard device(q.device());
  const Call call{q,
                  {k, v},
                  a,
                  gamma,
                  g,
                  {},
                  {state_first_k, state_first_v},
                  {state_k, state_v},
                  state_position,
                  cu_seqlens,
                  chunk,
                  phi,
                  f};
  const auto path = path_of(problem, call);
  if (path == Path::Code::aten) {
    at::NoTF32Guard exact;
    return forward(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v, state_position,
                   cu_seqlens, chunk, phi, f, save);
  }
  const auto made = run_forward(path, call, save);
  const auto& saved = made.saved;
  return {made.o,
          made.last_first[0],
          made.last[0],
          made.last_first[1],
          made.last[1],
          made.position,
          saved.memories[0],
          saved.memories[1],
          saved.z,
          saved.u,
          saved.fit};
}

Gradients backward_cuda(const OptionalTensor& grad_o, const OptionalTensor& grad_first_k,
                        const OptionalTensor& grad_k, const OptionalTensor& grad_first_v,
                        const OptionalTensor& grad_v, const OptionalTensor& grad_position, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                        const OptionalTensor& g, const OptionalTensor& state_first_k,
                        const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                        const OptionalTensor& state_v, const OptionalTensor& state_position,
                        const OptionalTensor& cu_seqlens, const Tensor& memories_k, const Tensor& memories_v,
                        const Tensor& z, const Tensor& u, const Tensor& fit, int64_t chunk,
                        std::string_view phi, std::string_view f) {
  const auto problem = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                      state_position, cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard device(q.device());
  const Call call{q,
                  {k, v},
                  a,
                  gamma,
                  g,
                  {},
                  {state_first_k, state_first_v},
                  {state_k, state_v},
                  state_position,
                  cu_seqlens,
                  chunk,
                  phi,
                  f};
  const auto path = path_of(problem, call);
  if (path == Path::Code::aten) {
    return run_without_kernel<&backward_cuda>("trellis_backward", grad_o, grad_first_k, grad_k, grad_first_v,
                                              grad_v, grad_position, q, k, v, a, gamma, g, state_first_k,
                                              state_k, state_first_v, state_v, state_position, cu_seqlens,
                                              memories_k, memories_v, z, u, fit, chunk, phi, f);
  }
  const Saved saved{{memories_k, memories_v}, z, u, fit};
  check_saved("trellis", problem, call, saved);
  const auto found =
      run_backward(path, call, {grad_o, {grad_first_k, grad_first_v}, {grad_k, grad_v}}, saved);
  return {found.q,        found.x[0],       found.x[1],     found.a,          found.gamma,  found.g,
          found.first[0], found.initial[0], found.first[1], found.initial[1], std::nullopt, std::nullopt};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                 const OptionalTensor& g, const Tensor& state_first_k, const Tensor& state_k,
                 const Tensor& state_first_v, const Tensor& state_v, const Tensor& state_position,
                 int64_t chunk, std::string_view phi, std::string_view f) {
  check_step(describe("trellis"), q, {state_first_k, state_k, state_first_v, state_v, state_position});
  Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v, state_position,
                 std::nullopt, chunk, phi, f);
  if (Problem::step_path(q) == Path::Code::aten) {
    return run_without_kernel<&step_cuda>("trellis_step", q, k, v, a, gamma, g, state_first_k, state_k,
                                          state_first_v, state_v, state_position, chunk, phi, f);
  }
  const Call call{
      q,  {k, v}, a,   gamma, g, {}, {state_first_k, state_first_v}, {state_k, state_v}, state_position,
      {}, chunk,  phi, f};
  return run_step(call);
}

Explanation explain(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                    const OptionalTensor& g, const OptionalTensor& state_first_k,
                    const OptionalTensor& state_k, const OptionalTensor& state_first_v,
                    const OptionalTensor& state_v, const OptionalTensor& state_position,
                    const OptionalTensor& cu_seqlens, int64_t chunk, std::string_view phi, std::string_view f,
                    std::string_view device, bool step) {
  const auto p = Problem::check(q, k, v, a, gamma, g, state_first_k, state_k, state_first_v, state_v,
                                state_position, cu_seqlens, chunk, phi, f);
  const c10::cuda::CUDAGuard guard(q.device());
  const Call call{q,
                  {k, v},
                  a,
                  gamma,
                  g,
                  {},
                  {state_first_k, state_first_v},
                  {state_k, state_v},
                  state_position,
                  cu_seqlens,
                  chunk,
                  phi,
                  f};
  return explained(step ? Problem::step_path(q) : path_of(p, call), device);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  m.impl("trellis_explain", &explain);
  m.impl("trellis_forward", &forward_cuda);
  m.impl("trellis_backward", &backward_cuda);
  m.impl("trellis_step", &step_cuda);
}

}  // namespace girih::trellis

// The path of a call of trellis or ttt, and its dispatch to the kernels.
#pragma once

#include "exact.h"
#include "tensor_cores.h"

namespace girih::trellis {

static_assert(kWidest == kernels::kTrellisWidest && kExactWidest == kernels::kTrellisExactWidest &&
              kKeptChunk == kernels::kChunk);

// The path of the problem, restricted by the shared memory of the device and by the number of sequences.
inline Path path_of(const Problem& problem, const Call& call) {
  const auto path = problem.path(call.q);
  if (problem.N == 0) return aten(kNoSequence);
  if (path == Path::Code::aten) return path;
  bool fits = false;
  if (path == Path::Code::exact) {
    check_launch("trellis_exact_fits", kernels::trellis_exact_fits(exact_shape(call), fits));
  } else {
    check_launch("trellis_fits", kernels::trellis_fits(fits));
  }
  return fits ? path : aten(kSmallCard);
}

// Run a call by a path with kernels.
inline Outputs run_forward(const Path& path, const Call& call, bool save) {
  return path == Path::Code::exact ? ExactCall(call).forward(save) : TensorCoreCall(call).forward(save);
}
inline InputGradients run_backward(const Path& path, const Call& call, const OutputGradients& gradients,
                                   const Saved& saved) {
  return path == Path::Code::exact ? ExactCall(call).backward(gradients, saved)
                                   : TensorCoreCall(call).backward(gradients, saved);
}

// One token; the state of the call is written in place.
inline Tensor run_step(const Call& call) {
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto token = [](const Tensor& x) { return x.select(1, 0); };
  const auto& q = call.q;
  const auto o = at::empty({q.size(0), 1, q.size(2), call.output_width()}, q.options());
  // The kernel reads contiguous positions.
  const auto position = call.position->contiguous();
  kernels::TrellisStep p;
  p.sequences = q.size(0);
  p.heads = static_cast<int>(call.x[0].size(2)), p.query_heads = static_cast<int>(q.size(2));
  p.memories = call.memories();
  p.D = static_cast<int>(call.width(0)), p.V = static_cast<int>(call.width(1));
  p.M = static_cast<int>(call.a.size(3)), p.chunk = static_cast<int>(call.chunk);
  p.phi = map_of(call.phi), p.f = map_of(call.f);
  p.q = input<3>(token(q)), p.k = input<3>(token(call.x[0])), p.a = input<3>(token(call.a));
  if (p.memories == 2) p.v = input<3>(token(call.x[1]));
  p.gamma = input<2>(token(call.gamma)), p.weight = input<2>(call.phi_weight);
  if (given(call.g)) p.g = input<2>(token(*call.g));
  for (int m = 0; m < p.memories; ++m) {
    p.first[m] = output<4>(*call.first[m]), p.memory[m] = output<4>(*call.state[m]);
  }
  p.position = position.mutable_data_ptr<int64_t>();
  p.o = output<3>(token(o));
  check_launch("trellis_step", kernels::trellis_step(p, c10::cuda::getCurrentCUDAStream()));
  if (!position.is_same(*call.position)) call.position->copy_(position);
  return o;
}

}  // namespace girih::trellis

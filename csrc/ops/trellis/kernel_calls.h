// The path of a call of trellis or ttt on a device, and the calls of its kernels.
#pragma once

#include "fp32.h"
#include "tensor_cores.h"

namespace girih::trellis {

static_assert(kMaxWidth == kernels::kTrellisMaxWidth && kMaxFp32Width == kernels::kTrellisFp32MaxWidth &&
              kChunkTokens == kernels::kChunk);

inline Path choose_path(const Problem& problem, const Call& call) {
  const auto path = problem.path(call);
  const auto fits = [&] {
    bool fits = false;
    if (path == Path::Code::fp32) {
      GIRIH_QUERY(trellis_fp32_fits, fp32_shape(call), fits);
    } else {
      GIRIH_QUERY(trellis_fits, fits);
    }
    return fits;
  };
  return restrict_path(path, problem.N, call.q.device(), fits, &aten);
}

// Run a call on a path with kernels.
inline Outputs run_forward(const Path& path, const Call& call, bool save) {
  return path == Path::Code::fp32 ? Fp32Call(call).forward(save) : TensorCoreCall(call).forward(save);
}
inline InputGradients run_backward(const Path& path, const Call& call, const OutputGradients& gradients,
                                   const SavedTensors& saved) {
  return path == Path::Code::fp32 ? Fp32Call(call).backward(gradients, saved)
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
  p.memories = call.memory_count();
  p.D = static_cast<int>(call.width(0)), p.V = static_cast<int>(call.width(1));
  p.M = static_cast<int>(call.a.size(3)), p.chunk = static_cast<int>(call.chunk);
  p.phi = parse_activation(call.phi), p.f = parse_activation(call.f);
  p.q = input<3>(token(q)), p.k = input<3>(token(call.x[0])), p.a = input<3>(token(call.a));
  if (p.memories == 2) p.v = input<3>(token(call.x[1]));
  p.gamma = input<2>(token(call.gamma)), p.weight = input<2>(call.phi_weight);
  if (is_defined(call.g)) p.g = input<2>(token(*call.g));
  for (int m = 0; m < p.memories; ++m) {
    p.chunk_start[m] = output<4>(*call.chunk_start[m]), p.memory[m] = output<4>(*call.memory[m]);
  }
  p.position = position.mutable_data_ptr<int64_t>();
  p.o = output<3>(token(o));
  GIRIH_LAUNCH(trellis_step, p);
  if (!position.is_same(*call.position)) call.position->copy_(position);
  return o;
}

}  // namespace girih::trellis

// One token of gla, the state in place.
#include "gla/gla.h"
#include "gsa/step.cuh"

namespace girih::kernels {
namespace {

template <int Pack_>
__global__ void __launch_bounds__(kStepThreads) gla_step_kernel(const __grid_constant__ GlaStep p) {
  extern __shared__ float shared[];
  float* const parts = shared;  // kStepThreads * Pack_
  float* const decay = parts + kStepThreads * Pack_;
  float* const k = decay + p.D;
  float* const q = k + p.D;
  float* const v = q + p.D;
  float* const o = v + p.V + Pack_;
  const int64_t n = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x % p.heads), group = p.query_heads / p.heads;

  for (int d = threadIdx.x; d < p.D; d += kStepThreads) {
    decay[d] = p.g.data == nullptr ? 1.f : expf(element(p.g, n, head, d));
    k[d] = element(p.k, n, head, d);
  }
  for (int i = threadIdx.x; i < p.V; i += kStepThreads) v[i] = element(p.v, n, head, i);
  for (int i = 0; i < group; ++i) {
    const int query_head = head * group + i;
    __syncthreads();
    for (int d = threadIdx.x; d < p.D; d += kStepThreads) q[d] = p.scale * element(p.q, n, query_head, d);
    __syncthreads();
    // S <- Diag(e^g) S + k v^T,   o = scale S^T q
    update_and_read<Pack_>(
        p.state, n, head, p.D, p.V, i == 0, [&](int d, int) { return decay[d]; }, k, v, q, o, parts);
    for (int c = threadIdx.x; c < p.V; c += kStepThreads) {
      store_any(p.o.data, p.o.dtype, n * p.o.stride[0] + query_head * p.o.stride[1] + c * p.o.stride[2],
                o[c]);
    }
  }
}

template <int Pack_>
cudaError_t launch(const GlaStep& p, cudaStream_t stream) {
  const int floats = kStepThreads * Pack_ + 3 * p.D + 2 * p.V + Pack_;
  return launch_step<gla_step_kernel<Pack_>>(p, floats, stream);
}

}  // namespace

cudaError_t gla_step(const GlaStep& p, cudaStream_t stream) {
  return p.V % 4 == 0 && fits_packs(p.state, 4, sizeof(float)) ? launch<4>(p, stream) : launch<1>(p, stream);
}

}  // namespace girih::kernels

// gla_step: one token of gla; updates the state in place.
#include "gla/gla.h"
#include "gsa/step.cuh"

namespace girih::kernels {
namespace {

template <int Pack_, bool Held>
__global__ void __launch_bounds__(kStepThreads) gla_step_kernel(const __grid_constant__ GlaStep p) {
  extern __shared__ __align__(16) float shared[];
  float* const held = shared;
  float* const parts = held + (Held ? p.D * p.V : 0);  // kStepThreads * Pack_
  float* const v = parts + kStepThreads * Pack_;       // v is aligned to a pack
  float* const decay = v + p.V;
  float* const k = decay + p.D;
  float* const q = k + p.D;
  const int64_t n = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x % p.heads), group = p.query_heads / p.heads;

  const StepMemory<Pack_, Held> S(p.state, n, head, p.D, p.V, held, group > 1);

  // A thread issues all its loads of the token and of the first query before it uses any of them; the loop
  // has one iteration if no vector is longer than the block.
  for (int i = threadIdx.x; i < max(p.D, p.V); i += kStepThreads) {
    RawElement of_g, of_k, of_q, of_v;
    if (i < p.D) {
      if (p.g.data != nullptr) of_g = element(p.g, n, head, i);
      of_k = element(p.k, n, head / p.key_share, i), of_q = element(p.q, n, head * group / p.query_share, i);
    }
    if (i < p.V) of_v = element(p.v, n, head, i);

    if (i < p.D) {
      decay[i] = expf(value_of(of_g, p.g.dtype));  // no gate: e^0
      k[i] = value_of(of_k, p.k.dtype), q[i] = p.scale * value_of(of_q, p.q.dtype);
    }
    if (i < p.V) v[i] = value_of(of_v, p.v.dtype);
  }
  __syncthreads();

  wait_copies<0>();
  for (int member = 0; member < group; ++member) {
    const int query_head = head * group + member;
    // S <- Diag(e^g) S + k v^T,   o = scale S^T q
    update_and_read<Decays::rows>(S, member == 0, decay, k, v, q, parts,
                                  [&](int c, float sum) { store_any(p.o, sum, n, query_head, c); });
    if (member + 1 < group) {
      for (int d = threadIdx.x; d < p.D; d += kStepThreads) {
        q[d] = p.scale * load_any(p.q, n, query_head + 1, d);
      }
      __syncthreads();
    }
  }
}

template <int Pack_, bool Held>
cudaError_t launch(const GlaStep& p, cudaStream_t stream) {
  const int64_t D = p.D, V = p.V, held = Held ? D * V : 0;
  return launch_step<gla_step_kernel<Pack_, Held>>(p, held + kStepThreads * Pack_ + 3 * D + V, stream);
}

}  // namespace

cudaError_t gla_step(const GlaStep& p, cudaStream_t stream) {
  if (p.V % 4 != 0 || !fits_packs(p.state, 4, sizeof(float))) return launch<1, false>(p, stream);
  return int64_t{p.D} * p.V <= kStepHeld ? launch<4, true>(p, stream) : launch<4, false>(p, stream);
}

}  // namespace girih::kernels

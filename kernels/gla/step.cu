// gla_step: one token of gla; updates the state in place.
#include "gla/gla.h"
#include "gsa/step.cuh"

namespace girih::kernels {
namespace {

template <int Pack_, bool InShared>
__global__ void __launch_bounds__(kStepThreads) gla_step_kernel(const __grid_constant__ GlaStep p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  float* const shared_copy = shared;
  float* const partials = shared_copy + (InShared ? p.D * p.V : 0);  // kStepThreads * Pack_
  float* const v = partials + kStepThreads * Pack_;                  // v is aligned to a pack
  float* const decay = v + p.V;
  float* const k = decay + p.D;
  float* const q = k + p.D;
  const int64_t n = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x % p.heads), group = p.query_heads / p.heads;

  const StepMemory<Pack_, InShared> S(p.state, n, head, p.D, p.V, shared_copy, group > 1);

  // A thread issues all its loads of the token and of the first query before it uses any of them; the loop
  // has one iteration if no vector is longer than the block.
  for (int i = threadIdx.x; i < max(p.D, p.V); i += kStepThreads) {
    RawElement raw_g, raw_k, raw_q, raw_v;
    if (i < p.D) {
      if (p.g.data != nullptr) raw_g = load_raw_element(p.g, n, head, i);
      raw_k = load_raw_element(p.k, n, head / p.key_share, i),
      raw_q = load_raw_element(p.q, n, head * group / p.query_share, i);
    }
    if (i < p.V) raw_v = load_raw_element(p.v, n, head, i);

    if (i < p.D) {
      decay[i] = expf(decode_element(raw_g, p.g.dtype));  // no gate: e^0
      k[i] = decode_element(raw_k, p.k.dtype), q[i] = p.scale * decode_element(raw_q, p.q.dtype);
    }
    if (i < p.V) v[i] = decode_element(raw_v, p.v.dtype);
  }
  __syncthreads();

  wait_copies<0>();
  for (int query = 0; query < group; ++query) {
    const int query_head = head * group + query;
    // S <- Diag(e^g) S + k v^T,   o = scale S^T q
    update_and_read<DecayAxis::rows>(S, query == 0, decay, k, v, q, partials,
                                     [&](int c, float sum) { store_element(p.o, sum, n, query_head, c); });
    if (query + 1 < group) {
      for (int d = threadIdx.x; d < p.D; d += kStepThreads) {
        q[d] = p.scale * load_element(p.q, n, query_head + 1, d);
      }
      __syncthreads();
    }
  }
}

template <int Pack_, bool InShared>
cudaError_t launch(const GlaStep& p, cudaStream_t stream) {
  const int64_t D = p.D, V = p.V, shared_copy = InShared ? D * V : 0;
  return launch_step<gla_step_kernel<Pack_, InShared>>(p, shared_copy + kStepThreads * Pack_ + 3 * D + V,
                                                       stream);
}

}  // namespace

cudaError_t gla_step(const GlaStep& p, cudaStream_t stream) {
  if (p.V % 4 != 0 || !is_pack_aligned(p.state, 4, sizeof(float))) return launch<1, false>(p, stream);
  return int64_t{p.D} * p.V <= kStepMaxSharedFloats ? launch<4, true>(p, stream)
                                                    : launch<4, false>(p, stream);
}

}  // namespace girih::kernels

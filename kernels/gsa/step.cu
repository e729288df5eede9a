// gsa_step: one token of gsa; updates the state in place.
#include "gsa/step.cuh"

namespace girih::kernels {
namespace {

__device__ float block_reduce(float value, bool is_max, float* partials) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(~0u, value, offset);
    value = is_max ? fmaxf(value, other) : value + other;
  }
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = value;
  __syncthreads();
  value = partials[0];
  for (int w = 1; w < kStepThreads / 32; ++w)
    value = is_max ? fmaxf(value, partials[w]) : value + partials[w];
  __syncthreads();
  return value;
}

// p[0..M-1] = feature(scale * p), p: the logits.
__device__ void apply_feature(float* p, int M, Feature feature, float scale, float* partials) {
  if (feature == Feature::softmax) {
    float max_logit = -INFINITY, sum = 0.f;
    for (int m = threadIdx.x; m < M; m += kStepThreads) max_logit = fmaxf(max_logit, scale * p[m]);
    max_logit = block_reduce(max_logit, true, partials);
    for (int m = threadIdx.x; m < M; m += kStepThreads) sum += p[m] = expf(scale * p[m] - max_logit);
    sum = block_reduce(sum, false, partials);
    for (int m = threadIdx.x; m < M; m += kStepThreads) p[m] /= sum;
  } else {
    for (int m = threadIdx.x; m < M; m += kStepThreads) {
      const float x = scale * p[m], positive = fmaxf(x, 0.f);
      p[m] = feature == Feature::silu    ? x / (1.f + expf(-x))
             : feature == Feature::relu  ? positive
             : feature == Feature::relu2 ? positive * positive
                                         : x;
    }
  }
  __syncthreads();
}

// Decay of a slot, and the weight of the new token.
struct Gate {
  float decay, weight;
};

// ABC: z' = logaddexp(z, s), the decay is e^{z - z'}, the weight e^{s - z'}; z is replaced by z'.
__device__ Gate abc_gate(float& z, float logit) {
  if (logit == -INFINITY) return {1.f, 0.f};
  const float before = z, max_logit = fmaxf(z, logit);
  if (before == -INFINITY) {  // the memory is empty
    z = logit;
    return {1.f, 1.f};
  }
  z = max_logit + log1pf(expf(fminf(before, logit) - max_logit));
  return {expf(before - z), expf(logit - z)};
}

template <int Pack_, bool InShared>
__global__ void __launch_bounds__(kStepThreads) gsa_step_kernel(const __grid_constant__ GsaStep p) {
  GIRIH_DYNAMIC_SHARED(float, shared, 16);
  float* const shared_k = shared;
  float* const shared_v = shared_k + (InShared ? p.D * p.M : 0);
  float* const partials = shared_v + (InShared ? p.M * p.V : 0);  // kStepThreads * Pack_
  float* const s = partials + kStepThreads * Pack_;               // s to k start at multiples of a pack
  float* const decay = s + p.M;
  float* const v = decay + p.M;
  float* const slots = v + p.V;
  float* const k = slots + p.M;
  float* const q = k + p.D;
  const int64_t n = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x % p.heads), group = p.query_heads / p.heads;

  const StepMemory<Pack_, InShared> Hk(p.state_k, n, head, p.D, p.M, shared_k, group > 1);
  const StepMemory<Pack_, InShared> Hv(p.state_v, n, head, p.M, p.V, shared_v, group > 1);

  // A thread issues all its loads of the token and of the first query before it uses any of them; the loop
  // has one iteration if no vector is longer than the block.
  const bool is_abc = p.z.data != nullptr;
  for (int i = threadIdx.x; i < max(p.M, max(p.D, p.V)); i += kStepThreads) {
    RawElement raw_s, raw_g, raw_k, raw_q, raw_v;
    float z = 0.f;
    if (i < p.M) {
      if (p.s.data != nullptr) raw_s = load_raw_element(p.s, n, head, i);
      if (is_abc) z = static_cast<const float*>(p.z.data)[offset_of(p.z, n, head, i)];
      if (!is_abc) raw_g = load_raw_element(p.g, n, head, i);
    }
    if (i < p.D) raw_k = load_raw_element(p.k, n, head, i), raw_q = load_raw_element(p.q, n, head * group, i);
    if (i < p.V) raw_v = load_raw_element(p.v, n, head, i);

    if (i < p.M) {
      Gate gate;
      if (is_abc) {
        gate = abc_gate(z, decode_element(raw_s, p.s.dtype));
        static_cast<float*>(p.z.data)[offset_of(p.z, n, head, i)] = z;
      } else {
        const float g = decode_element(raw_g, p.g.dtype);
        gate = {expf(g), p.s.data == nullptr ? -expm1f(g) : decode_element(raw_s, p.s.dtype)};
      }
      decay[i] = gate.decay, s[i] = gate.weight;
    }
    if (i < p.D) k[i] = decode_element(raw_k, p.k.dtype), q[i] = decode_element(raw_q, p.q.dtype);
    if (i < p.V) v[i] = decode_element(raw_v, p.v.dtype);
  }
  __syncthreads();

  for (int query = 0; query < group; ++query) {
    const int query_head = head * group + query;
    // Hk <- Hk Diag(e^g) + k s^T,   logits = Hk^T q
    wait_copies<1>();
    update_and_read<DecayAxis::columns>(Hk, query == 0, decay, k, s, q, partials,
                                        [&](int m, float logit) { slots[m] = logit; });
    if (query + 1 < group) {  // q has been read; apply_feature has barriers before the next use
      for (int d = threadIdx.x; d < p.D; d += kStepThreads) q[d] = load_element(p.q, n, query_head + 1, d);
    }
    apply_feature(slots, p.M, p.feature, p.scale, partials);
    // Hv <- Diag(e^g) Hv + s v^T,   o = Hv^T p
    wait_copies<0>();
    update_and_read<DecayAxis::rows>(Hv, query == 0, decay, s, v, slots, partials,
                                     [&](int c, float sum) { store_element(p.o, sum, n, query_head, c); });
  }
}

template <int Pack_, bool InShared>
cudaError_t launch(const GsaStep& p, cudaStream_t stream) {
  const int64_t D = p.D, V = p.V, M = p.M, shared_copy = InShared ? M * (D + V) : 0;
  return launch_step<gsa_step_kernel<Pack_, InShared>>(
      p, shared_copy + kStepThreads * Pack_ + 3 * M + 2 * D + V, stream);
}

}  // namespace

cudaError_t gsa_step(const GsaStep& p, cudaStream_t stream) {
  const auto fits = [](const OutputTensor<4>& state, int cols) {
    return cols % 4 == 0 && is_pack_aligned(state, 4, sizeof(float));
  };
  if (!fits(p.state_k, p.M) || !fits(p.state_v, p.V)) return launch<1, false>(p, stream);
  return int64_t{p.M} * (p.D + p.V) <= kStepMaxSharedFloats ? launch<4, true>(p, stream)
                                                            : launch<4, false>(p, stream);
}

}  // namespace girih::kernels

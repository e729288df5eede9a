// One token of gsa, the state in place.
#include "gsa/step.cuh"

namespace girih::kernels {
namespace {

__device__ float block_reduce(float value, bool largest, float* parts) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(~0u, value, offset);
    value = largest ? fmaxf(value, other) : value + other;
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int w = 1; w < kStepThreads / 32; ++w) value = largest ? fmaxf(value, parts[w]) : value + parts[w];
  __syncthreads();
  return value;
}

// p = feature(scale * logits), in place, M of them.
__device__ void apply_feature(float* p, int M, Feature feature, float scale, float* parts) {
  if (feature == Feature::softmax) {
    float top = -INFINITY, sum = 0.f;
    for (int m = threadIdx.x; m < M; m += kStepThreads) top = fmaxf(top, scale * p[m]);
    top = block_reduce(top, true, parts);
    for (int m = threadIdx.x; m < M; m += kStepThreads) sum += p[m] = expf(scale * p[m] - top);
    sum = block_reduce(sum, false, parts);
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

template <int Pack_>
__global__ void __launch_bounds__(kStepThreads) gsa_step_kernel(const __grid_constant__ GsaStep p) {
  extern __shared__ float shared[];
  float* const parts = shared;  // kStepThreads * Pack_
  float* const s = parts + kStepThreads * Pack_;
  float* const decay = s + p.M + Pack_;
  float* const k = decay + p.M + Pack_;
  float* const v = k + p.D;
  float* const q = v + p.V + Pack_;
  float* const slots = q + p.D;
  float* const o = slots + p.M;
  const int64_t n = blockIdx.x / p.heads;
  const int head = static_cast<int>(blockIdx.x % p.heads), group = p.query_heads / p.heads;

  for (int m = threadIdx.x; m < p.M; m += kStepThreads) {
    if (p.z.data != nullptr) {  // ABC: z <- logaddexp(z, s), g = z before - z, s <- e^{s - z}
      float& z = static_cast<float*>(p.z.data)[n * p.z.stride[0] + head * p.z.stride[1] + m * p.z.stride[2]];
      const float logit = element(p.s, n, head, m), top = fmaxf(z, logit);
      if (logit == -INFINITY) {
        s[m] = 0.f, decay[m] = 1.f;
      } else if (z == -INFINITY) {
        s[m] = 1.f, decay[m] = 1.f, z = logit;  // an empty memory has nothing to decay
      } else {
        const float next = top + log1pf(expf(fminf(z, logit) - top));
        s[m] = expf(logit - next), decay[m] = expf(z - next), z = next;
      }
    } else {
      const float g = element(p.g, n, head, m);
      s[m] = p.s.data == nullptr ? -expm1f(g) : element(p.s, n, head, m);
      decay[m] = expf(g);
    }
  }
  for (int d = threadIdx.x; d < p.D; d += kStepThreads) k[d] = element(p.k, n, head, d);
  for (int d = threadIdx.x; d < p.V; d += kStepThreads) v[d] = element(p.v, n, head, d);
  for (int i = 0; i < group; ++i) {
    const int query_head = head * group + i;
    __syncthreads();
    for (int d = threadIdx.x; d < p.D; d += kStepThreads) q[d] = element(p.q, n, query_head, d);
    __syncthreads();
    // Hk <- Hk Diag(e^g) + k s^T,   logits = Hk^T q
    update_and_read<Pack_>(
        p.state_k, n, head, p.D, p.M, i == 0, [&](int, int m) { return decay[m]; }, k, s, q, slots, parts);
    apply_feature(slots, p.M, p.feature, p.scale, parts);
    // Hv <- Diag(e^g) Hv + s v^T,   o = Hv^T p
    update_and_read<Pack_>(
        p.state_v, n, head, p.M, p.V, i == 0, [&](int m, int) { return decay[m]; }, s, v, slots, o, parts);
    for (int d = threadIdx.x; d < p.V; d += kStepThreads) {
      store_any(p.o.data, p.o.dtype, n * p.o.stride[0] + query_head * p.o.stride[1] + d * p.o.stride[2],
                o[d]);
    }
  }
}

template <int Pack_>
cudaError_t launch(const GsaStep& p, cudaStream_t stream) {
  const int floats = kStepThreads * Pack_ + 3 * p.M + 2 * p.D + 2 * p.V + 3 * Pack_;
  return launch_step<gsa_step_kernel<Pack_>>(p, floats, stream);
}

}  // namespace

cudaError_t gsa_step(const GsaStep& p, cudaStream_t stream) {
  const auto fits = [](const Out<4>& state, int cols) {
    return cols % 4 == 0 && fits_packs(state, 4, sizeof(float));
  };
  return fits(p.state_k, p.M) && fits(p.state_v, p.V) ? launch<4>(p, stream) : launch<1>(p, stream);
}

}  // namespace girih::kernels

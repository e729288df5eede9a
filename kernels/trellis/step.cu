// One token of both memories: each is read and written once, A' read, and written where the token completes
// its chunk. One block a sequence and head.
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "trellis/maps.cuh"

namespace girih::kernels {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ inline float sum_over_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
__device__ inline float max_over_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// By one warp: what the sums of y = silu(z) or z [M] with a come to.
template <class Map>
__device__ inline Fit fit_row(const Map& map, const float* y, const float* a, int M) {
  const auto sum_of = [&](const auto& term) {
    float sum = 0.f;
    for (int m = lane(); m < M; m += 32) sum += term(y[m], a[m]);
    return sum_over_warp(sum);
  };
  if constexpr (Map::softmax) {
    float most = -1e30f;
    for (int m = lane(); m < M; m += 32) most = fmaxf(most, y[m]);
    most = max_over_warp(most);
    const auto e = [&](float x) { return expf(x - most); };
    const Moments whole[1] = {{most, sum_of([&](float x, float) { return e(x); }),
                               sum_of([&](float x, float) { return e(x) * e(x); }),
                               sum_of([&](float x, float t) { return t * e(x); })}};
    return fit(map, whole, 0.f);
  } else {
    const float mean = sum_of([](float x, float) { return x; }) * map.centre;
    return fit_about(map, mean, sum_of([&](float x, float) { return (x - mean) * (x - mean); }),
                     sum_of([&](float x, float t) { return t * (x - mean); }),
                     sum_of([](float, float t) { return t; }));
  }
}

struct StepSpace {
  float *q, *k, *v, *a, *z[2], *slope[2], *r, *parts;

  __device__ StepSpace(float* at, const TrellisStep& p) {
    q = at, k = q + p.D, v = k + p.D, a = v + p.V, z[0] = a + p.M, z[1] = z[0] + p.M;
    slope[0] = z[1] + p.M, slope[1] = slope[0] + p.M, r = slope[1] + p.M, parts = r + p.M;
  }
  static int64_t floats(const TrellisStep& p) { return 2 * p.D + (1 + kWarps) * int64_t{p.V} + 6 * p.M; }
};

__global__ void __launch_bounds__(kThreads) trellis_step_kernel(const __grid_constant__ TrellisStep p) {
  extern __shared__ __align__(16) float shared[];
  const StepSpace space(shared, p);
  const int64_t n = blockIdx.x / static_cast<unsigned>(p.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads)), thread = threadIdx.x,
            warp = warp_index(), group = p.query_heads / p.heads;
  const bool completes = clamp(p.position[n], 0, p.chunk - 1) == p.chunk - 1;

  const auto fetch = [&](float* to, const In<3>& x, int at, int width) {
    for (int i = thread; i < width; i += kThreads) to[i] = load_any(x, n, at, i);
  };
  fetch(space.k, p.k, head, p.D);
  fetch(space.v, p.v, head, p.V);
  fetch(space.a, p.a, head, p.M);
  fetch(space.q, p.q, head * group, p.D);
  const float gamma = load_any(p.gamma, n, head);
  const float decay = p.g.data == nullptr ? 1.f : expf(load_any(p.g, n, head));
  __syncthreads();

  // z = A' x: a warp a row. A chunk of one token begins with it, and A' is the memory.
  const auto row = [&](const Out<4>& state, int m) {
    return static_cast<float*>(state.data) + offset_of(state, n, head, m);
  };
  const auto width = [&](int memory) { return memory == 0 ? p.D : p.V; };
#pragma unroll
  for (int memory = 0; memory < 2; ++memory) {
    const float* x = memory == 0 ? space.k : space.v;
    const Out<4>& first = p.chunk == 1 ? p.memory[memory] : p.first[memory];
    for (int m = warp; m < p.M; m += kWarps) {
      const float* A = row(first, m);
      float z = 0.f;
      for (int i = lane(); i < width(memory); i += 32) z = fmaf(A[i * first.stride[3]], x[i], z);
      z = sum_over_warp(z);
      if (lane() == 0) {
        const float s = 1.f / (1.f + expf(-z)), y = z * s;
        space.z[memory][m] = p.phi.silu ? y : z;
        space.slope[memory][m] = p.phi.silu ? fmaf(y, 1.f - s, s) : 1.f;
      }
    }
  }
  __syncthreads();
  // u = J_phi(z)^T (phi(z) - a), a warp a memory
  if (warp < 2) {
    float *z = warp == 0 ? space.z[0] : space.z[1], *slope = warp == 0 ? space.slope[0] : space.slope[1];
    with_map(p.phi, p.M, [&](const auto& phi) {
      const Fit found = fit_row(phi, z, space.a, p.M);
      const Residual residual(found);
      for (int m = lane(); m < p.M; m += 32) {
        if constexpr (phi.softmax) {
          const float at = softmax_of(phi, found, z[m]);
          z[m] = at * (at - space.a[m] - (found.beta - found.mean_a));
        } else {
          z[m] = slope[m] * residual(z[m], space.a[m]);
        }
      }
    });
  }
  __syncthreads();

  for (int member = 0; member < group; ++member) {
    if (member > 0) {
      __syncthreads();
      fetch(space.q, p.q, head * group + member, p.D);
      __syncthreads();
    }
    // A <- e^g A - gamma u k^T, y = A q
    for (int m = warp; m < p.M; m += kWarps) {
      float* A = row(p.memory[0], m);
      float* first = row(p.first[0], m);
      const float step = gamma * space.z[0][m];
      float y = 0.f;
      for (int i = lane(); i < p.D; i += 32) {
        float now = A[i * p.memory[0].stride[3]];
        if (member == 0) {
          now = fmaf(decay, now, -step * space.k[i]);
          A[i * p.memory[0].stride[3]] = now;
          if (completes) first[i * p.first[0].stride[3]] = now;
        }
        y = fmaf(now, space.q[i], y);
      }
      y = sum_over_warp(y);
      if (lane() == 0) space.r[m] = p.f.silu ? y / (1.f + expf(-y)) : y;
    }
    __syncthreads();
    // r = f(y)
    if (warp == 0) {
      with_map(p.f, p.M, [&](const auto& f) {
        const Fit found = fit_row(f, space.r, space.r, p.M);
        for (int m = lane(); m < p.M; m += 32) {
          if constexpr (f.softmax) {
            space.r[m] = softmax_of(f, found, space.r[m]);
          } else {
            space.r[m] = (space.r[m] - found.mean) * found.inverse;
          }
        }
      });
    }
    __syncthreads();
    // A <- e^g A - gamma u v^T, o = A^T r
    for (int i = lane(); i < p.V; i += 32) {
      float o = 0.f;
      for (int m = warp; m < p.M; m += kWarps) {
        float* A = row(p.memory[1], m) + i * p.memory[1].stride[3];
        float now = *A;
        if (member == 0) {
          now = fmaf(decay, now, -gamma * space.z[1][m] * space.v[i]);
          *A = now;
          if (completes) row(p.first[1], m)[i * p.first[1].stride[3]] = now;
        }
        o = fmaf(now, space.r[m], o);
      }
      space.parts[warp * p.V + i] = o;
    }
    __syncthreads();
    for (int i = thread; i < p.V; i += kThreads) {
      float o = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) o += space.parts[w * p.V + i];
      store_any(p.o, o, n, head * group + member, i);
    }
  }
}

// Once all heads of a sequence have read where it is.
__global__ void advance_kernel(int64_t* position, int64_t sequences, int chunk) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n < sequences) position[n] = (clamp(position[n], 0, chunk - 1) + 1) % chunk;
}

}  // namespace

cudaError_t trellis_step(const TrellisStep& p, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads, bytes = StepSpace::floats(p) * int64_t{sizeof(float)};
  if (blocks == 0) return cudaSuccess;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  if (bytes > limit) return cudaErrorInvalidValue;
  if (const cudaError_t error = allow_shared<trellis_step_kernel>(limit); error != cudaSuccess) return error;
  trellis_step_kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<unsigned>(bytes), stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  advance_kernel<<<static_cast<unsigned>(divide_up(p.sequences, kThreads)), kThreads, 0, stream>>>(
      p.position, p.sequences, p.chunk);
  return cudaGetLastError();
}

}  // namespace girih::kernels

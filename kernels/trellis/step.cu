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

// A block's token: its sequence, head and vectors, and what is done with them, in this order. A barrier is
// between any two of its phases.
struct StepBlock {
  const TrellisStep& p;
  const int64_t n;
  const int head, group;  // group: queries of the head
  const int thread, warp;
  const bool completes;  // its chunk
  float gamma, decay;
  float *q, *k, *v, *a, *z[2], *slope[2], *r, *parts;  // in shared memory

  __device__ StepBlock(float* at, const TrellisStep& p)
      : p(p),
        n(blockIdx.x / static_cast<unsigned>(p.heads)),
        head(static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads))),
        group(p.query_heads / p.heads),
        thread(threadIdx.x),
        warp(warp_index()),
        completes(clamp(p.position[n], 0, p.chunk - 1) == p.chunk - 1) {
    q = at, k = q + p.D, v = k + p.D, a = v + p.V, z[0] = a + p.M, z[1] = z[0] + p.M;
    slope[0] = z[1] + p.M, slope[1] = slope[0] + p.M, r = slope[1] + p.M, parts = r + p.M;
  }
  static int64_t floats(const TrellisStep& p) { return 2 * p.D + (1 + kWarps) * int64_t{p.V} + 6 * p.M; }

  __device__ float* row(const Out<4>& state, int m) const {
    return static_cast<float*>(state.data) + offset_of(state, n, head, m);
  }

  __device__ void fetch(float* to, const In<3>& x, int at, int width) const {
    for (int i = thread; i < width; i += kThreads) to[i] = load_any(x, n, at, i);
  }
  __device__ void fetch_query(int member) const { fetch(q, p.q, head * group + member, p.D); }
  __device__ void fetch_token() {
    fetch(k, p.k, head, p.D);
    fetch(v, p.v, head, p.V);
    fetch(a, p.a, head, p.M);
    fetch_query(0);
    gamma = load_any(p.gamma, n, head);
    decay = p.g.data == nullptr ? 1.f : expf(load_any(p.g, n, head));
  }

  // z = A' x, and then silu(z) and its slope: a warp a row. A chunk of one token begins with it, and A' is
  // the memory.
  template <int Memory>
  __device__ void products() const {
    const float* const x = Memory == 0 ? k : v;
    const int width = Memory == 0 ? p.D : p.V;
    const Out<4>& first = p.chunk == 1 ? p.memory[Memory] : p.first[Memory];
    for (int m = warp; m < p.M; m += kWarps) {
      const float* A = row(first, m);
      float sum = 0.f;
      for (int i = lane(); i < width; i += 32) sum = fmaf(A[i * first.stride[3]], x[i], sum);
      sum = sum_over_warp(sum);
      if (lane() == 0) {
        const float s = 1.f / (1.f + expf(-sum)), y = sum * s;
        z[Memory][m] = p.phi.silu ? y : sum;
        slope[Memory][m] = p.phi.silu ? fmaf(y, 1.f - s, s) : 1.f;
      }
    }
  }

  // u = J_phi(z)^T (phi(z) - a), in the place of z: a warp a memory.
  __device__ void residuals() const {
    float *of = warp == 0 ? z[0] : z[1], *by = warp == 0 ? slope[0] : slope[1];
    with_map(p.phi, p.M, [&](const auto& phi) {
      const Fit found = fit_row(phi, of, a, p.M);
      const Residual residual(found);
      for (int m = lane(); m < p.M; m += 32) {
        if constexpr (phi.softmax) {
          const float at = softmax_of(phi, found, of[m]);
          of[m] = at * (at - a[m] - (found.beta - found.mean_a));
        } else {
          of[m] = by[m] * residual(of[m], a[m]);
        }
      }
    });
  }

  // A <- e^g A - gamma u k^T, where it `steps`, and y = A q, silu(y) in the place of r.
  __device__ void pass_keys(bool steps) const {
    for (int m = warp; m < p.M; m += kWarps) {
      float* A = row(p.memory[0], m);
      float* first = row(p.first[0], m);
      const float step = gamma * z[0][m];
      float y = 0.f;
      for (int i = lane(); i < p.D; i += 32) {
        float now = A[i * p.memory[0].stride[3]];
        if (steps) {
          now = fmaf(decay, now, -step * k[i]);
          A[i * p.memory[0].stride[3]] = now;
          if (completes) first[i * p.first[0].stride[3]] = now;
        }
        y = fmaf(now, q[i], y);
      }
      y = sum_over_warp(y);
      if (lane() == 0) r[m] = p.f.silu ? y / (1.f + expf(-y)) : y;
    }
  }

  // r = f(y), by one warp.
  __device__ void map_read() const {
    with_map(p.f, p.M, [&](const auto& f) {
      const Fit found = fit_row(f, r, r, p.M);
      for (int m = lane(); m < p.M; m += 32) {
        if constexpr (f.softmax) {
          r[m] = softmax_of(f, found, r[m]);
        } else {
          r[m] = (r[m] - found.mean) * found.inverse;
        }
      }
    });
  }

  // A <- e^g A - gamma u v^T, where it `steps`, and o = A^T r, every warp's rows' part.
  __device__ void pass_values(bool steps) const {
    for (int i = lane(); i < p.V; i += 32) {
      float o = 0.f;
      for (int m = warp; m < p.M; m += kWarps) {
        float* A = row(p.memory[1], m) + i * p.memory[1].stride[3];
        float now = *A;
        if (steps) {
          now = fmaf(decay, now, -gamma * z[1][m] * v[i]);
          *A = now;
          if (completes) row(p.first[1], m)[i * p.first[1].stride[3]] = now;
        }
        o = fmaf(now, r[m], o);
      }
      parts[warp * p.V + i] = o;
    }
  }
  __device__ void store_read(int member) const {
    for (int i = thread; i < p.V; i += kThreads) {
      float o = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) o += parts[w * p.V + i];
      store_any(p.o, o, n, head * group + member, i);
    }
  }

  // Of one of the head's queries: the first passes both memories on.
  __device__ void pass(int member) const {
    pass_keys(member == 0);
    __syncthreads();
    if (warp == 0) map_read();
    __syncthreads();
    pass_values(member == 0);
    __syncthreads();
    store_read(member);
  }
};

__global__ void __launch_bounds__(kThreads, 6) trellis_step_kernel(const __grid_constant__ TrellisStep p) {
  extern __shared__ __align__(16) float shared[];
  StepBlock block(shared, p);
  block.fetch_token();
  __syncthreads();
  block.products<0>();
  block.products<1>();
  __syncthreads();
  if (block.warp < 2) block.residuals();
  __syncthreads();
  for (int member = 0; member < block.group; ++member) {
    if (member > 0) {
      __syncthreads();
      block.fetch_query(member);
      __syncthreads();
    }
    block.pass(member);
  }
}

// Once all heads of a sequence have read where it is.
__global__ void advance_kernel(int64_t* position, int64_t sequences, int chunk) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n < sequences) position[n] = (clamp(position[n], 0, chunk - 1) + 1) % chunk;
}

}  // namespace

cudaError_t trellis_step(const TrellisStep& p, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads, bytes = StepBlock::floats(p) * int64_t{sizeof(float)};
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

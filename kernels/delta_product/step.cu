// One token of delta_product, the state in place: it is read and written once.
//
// A block has 32 columns of one head's state, in registers through all steps: columns do not need each other.
// A thread has `Pack` neighbouring columns of every kGroups-th row.
#include "delta_product/delta_product.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace {

constexpr int kStepThreads = 256;
constexpr int kStepCols = 32;

template <int Rank>
__device__ float element(const In<Rank>& x, int64_t n, int64_t i, int64_t j, int64_t k = 0) {
  int64_t at = n * x.stride[0] + i * x.stride[1] + j * x.stride[2];
  if constexpr (Rank == 4) at += k * x.stride[3];
  return load_any(x.data, x.dtype, at);
}

// 1 / |x| of D elements, by every warp for itself.
__device__ float inverse_length(const float* x, int D) {
  float sum = 0.f;
  for (int d = threadIdx.x % 32; d < D; d += 32) sum = fmaf(x[d], x[d], sum);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return rsqrtf(sum + 1e-6f);
}

template <int Pack_>
struct StepSizes {
  static constexpr int kPacks = kStepCols / Pack_;
  static constexpr int kGroups = kStepThreads / kPacks;
  static constexpr int kRows = kDeltaMaxWidth / kGroups;  // a thread's, at most
};

// sums[c] = sum over rows d of S[d, c] x[d], for the thread's columns. parts: kStepThreads / 32 * kStepCols.
template <int Pack_>
__device__ Pack<Pack_> read(const Pack<Pack_> (&s)[StepSizes<Pack_>::kRows], const float* x, int D,
                            float* parts) {
  using Sizes = StepSizes<Pack_>;
  const int group = threadIdx.x / Sizes::kPacks, pack = threadIdx.x % Sizes::kPacks;
  Pack<Pack_> sum = zeros<Pack_>();
#pragma unroll
  for (int r = 0; r < Sizes::kRows; ++r) {
    const int d = group + r * Sizes::kGroups;
    if (d < D) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(s[r].at[i], x[d], sum.at[i]);
    }
  }
#pragma unroll
  for (int distance = 16; distance >= Sizes::kPacks; distance /= 2) {
#pragma unroll
    for (int i = 0; i < Pack_; ++i) sum.at[i] += __shfl_xor_sync(~0u, sum.at[i], distance);
  }
  __syncthreads();  // the last sums have been read
  if (threadIdx.x % 32 < Sizes::kPacks) {
#pragma unroll
    for (int i = 0; i < Pack_; ++i) parts[threadIdx.x / 32 * kStepCols + pack * Pack_ + i] = sum.at[i];
  }
  __syncthreads();
  sum = zeros<Pack_>();
  for (int w = 0; w < kStepThreads / 32; ++w) {
#pragma unroll
    for (int i = 0; i < Pack_; ++i) sum.at[i] += parts[w * kStepCols + pack * Pack_ + i];
  }
  return sum;
}

template <int Pack_>
__global__ void __launch_bounds__(kStepThreads) delta_step_kernel(const __grid_constant__ DeltaStep p) {
  using Sizes = StepSizes<Pack_>;
  __shared__ float k[kDeltaMaxWidth], b[kDeltaMaxWidth], parts[kStepThreads / 32 * kStepCols];
  const int slices = (p.V + kStepCols - 1) / kStepCols;
  const int slice = static_cast<int>(blockIdx.x % slices);
  const int head = static_cast<int>(blockIdx.x / slices % p.heads), group = p.query_heads / p.heads;
  const int64_t n = blockIdx.x / slices / p.heads;
  const int pack = threadIdx.x % Sizes::kPacks, first = threadIdx.x / Sizes::kPacks;
  const int col = slice * kStepCols + pack * Pack_;
  const bool mine = col < p.V;  // V is a multiple of the pack
  float* const S = static_cast<float*>(p.state.data) + n * p.state.stride[0] + head * p.state.stride[1] +
                   col * p.state.stride[3];

  // S <- e^g S
  const float decay = p.g.data == nullptr
                          ? 1.f
                          : expf(load_any(p.g.data, p.g.dtype, n * p.g.stride[0] + head * p.g.stride[1]));
  Pack<Pack_> s[Sizes::kRows];
#pragma unroll
  for (int r = 0; r < Sizes::kRows; ++r) {
    const int d = first + r * Sizes::kGroups;
    s[r] = mine && d < p.D ? load<Pack_>(S + d * p.state.stride[2]) : zeros<Pack_>();
  }
#pragma unroll
  for (int r = 0; r < Sizes::kRows; ++r) {
#pragma unroll
    for (int i = 0; i < Pack_; ++i) s[r].at[i] *= decay;
  }

  // S <- S + k (beta v - S^T (beta k))^T
  for (int j = 0; j < p.n; ++j) {
    __syncthreads();
    for (int d = threadIdx.x; d < p.D; d += kStepThreads) k[d] = element(p.k, n, j, head, d);
    __syncthreads();
    const float unit = p.unit ? inverse_length(k, p.D) : 1.f;
    for (int d = threadIdx.x; d < p.D; d += kStepThreads) b[d] = element(p.beta, n, j, head, d) * unit * k[d];
    __syncthreads();
    Pack<Pack_> error = read(s, b, p.D, parts);
#pragma unroll
    for (int i = 0; i < Pack_; ++i) {
      const float target =
          mine ? element(p.beta, n, j, head, col + i) * element(p.v, n, j, head, col + i) : 0.f;
      error.at[i] = target - error.at[i];
    }
#pragma unroll
    for (int r = 0; r < Sizes::kRows; ++r) {
      const int d = first + r * Sizes::kGroups;
      if (d < p.D) {
#pragma unroll
        for (int i = 0; i < Pack_; ++i) s[r].at[i] = fmaf(unit * k[d], error.at[i], s[r].at[i]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < Sizes::kRows; ++r) {
    const int d = first + r * Sizes::kGroups;
    if (mine && d < p.D) store<Pack_>(S + d * p.state.stride[2], s[r]);
  }

  // o = scale * S^T q
  for (int member = 0; member < group; ++member) {
    const int64_t query_head = static_cast<int64_t>(head) * group + member;
    __syncthreads();
    for (int d = threadIdx.x; d < p.D; d += kStepThreads) b[d] = element(p.q, n, query_head, d);
    __syncthreads();
    const float factor = p.scale * (p.unit ? inverse_length(b, p.D) : 1.f);
    const Pack<Pack_> o = read(s, b, p.D, parts);
    if (first == 0 && mine) {
#pragma unroll
      for (int i = 0; i < Pack_; ++i) {
        store_any(p.o.data, p.o.dtype,
                  n * p.o.stride[0] + query_head * p.o.stride[1] + (col + i) * p.o.stride[2],
                  factor * o.at[i]);
      }
    }
  }
}

template <int Pack_>
cudaError_t launch(const DeltaStep& p, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads * divide_up(p.V, kStepCols);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  delta_step_kernel<Pack_><<<static_cast<unsigned>(blocks), kStepThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t delta_step(const DeltaStep& p, cudaStream_t stream) {
  return p.V % 4 == 0 && fits_packs(p.state, 4, sizeof(float)) ? launch<4>(p, stream) : launch<1>(p, stream);
}

}  // namespace girih::kernels

// m = max z        S = sum of e^{z - m}        l = m + log S - z_label
// dz = e^{z - m} / S - [i = label]
//
// The cross entropy of one row z, and its gradient in place of z. A block has a row: the first pass computes
// m and S of every thread and then of the block, and the second pass, for which the row is in the L2 cache,
// computes dz.
#include "elementwise/elementwise.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {
namespace elementwise {
namespace {

constexpr int kPack = kElementwisePack, kThreads = 512, kWarps = kThreads / 32;

// The largest of some numbers z and the sum of e^{z - largest}; without numbers -inf and 0.
struct ExpSum {
  float largest = -INFINITY, sum = 0.f;

  __device__ void add(const ExpSum& other) {
    if (other.sum == 0.f) return;  // false for NaN
    const float most = fmaxf(largest, other.largest);
    sum = sum * expf(largest - most) + other.sum * expf(other.largest - most);
    largest = most;
  }
};

__device__ inline ExpSum reduce_block(ExpSum partial) {
  __shared__ ExpSum parts[kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    partial.add({__shfl_xor_sync(~0u, partial.largest, offset), __shfl_xor_sync(~0u, partial.sum, offset)});
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = partial;
  __syncthreads();  // the parts of all warps are stored
  ExpSum all = parts[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all.add(parts[w]);
  return all;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(const __grid_constant__ CrossEntropy p) {
  const int64_t row = blockIdx.x;
  T* const z = static_cast<T*>(p.z) + row * p.classes;
  const int64_t label = p.labels[row], first = static_cast<int64_t>(threadIdx.x) * kPack;
  constexpr int64_t kStep = kThreads * kPack;
  if (label == p.ignored) {
    for (int64_t i = first; i < p.classes; i += kStep) store(z + i, zeros<kPack>());
    if (threadIdx.x == 0) p.l[row] = 0.f;
    return;
  }
  ExpSum partial;
  for (int64_t i = first; i < p.classes; i += kStep) {
    const auto pack = load<kPack>(z + i);
    ExpSum part{pack.at[0], 0.f};
#pragma unroll
    for (int e = 1; e < kPack; ++e) part.largest = fmaxf(part.largest, pack.at[e]);
    if (part.largest == -INFINITY) continue;
#pragma unroll
    for (int e = 0; e < kPack; ++e) part.sum += expf(pack.at[e] - part.largest);
    partial.add(part);
  }
  const bool is_class = 0 <= label && label < p.classes;
  const float label_logit = threadIdx.x == 0 && is_class ? to_float(z[label]) : NAN;
  const ExpSum all = reduce_block(partial);  // after its barrier all threads have read label_logit
  const float per_sum = 1.f / all.sum;
  if (threadIdx.x == 0) p.l[row] = all.largest - label_logit + logf(all.sum);
  for (int64_t i = first; i < p.classes; i += kStep) {
    auto pack = load<kPack>(z + i);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      pack.at[e] = expf(pack.at[e] - all.largest) * per_sum - (i + e == label ? 1.f : 0.f);
    }
    store(z + i, pack);
  }
}

}  // namespace
}  // namespace elementwise

cudaError_t cross_entropy(const CrossEntropy& p, cudaStream_t stream) {
  using namespace elementwise;
  if (p.rows == 0) return cudaSuccess;
  if (p.rows > 0x7fffffff) return cudaErrorInvalidValue;
  return dispatch_dtype(p.dtype, [&](auto element) {
    return launch_grid<cross_entropy_kernel<decltype(element)>>(p.rows, kThreads, 0, stream, p);
  });
}

}  // namespace girih::kernels

// beta at t = mean over D of s,    s = sigmoid(total / (t + 1))        dtotal = dbeta s (1 - s) / (D (t + 1))
//
// A few lanes have a token's row of a head.
#include "linear_path/row.cuh"
#include "tile/silu.h"

namespace girih::kernels {
namespace linear_path {
namespace {

template <class R>
__global__ void __launch_bounds__(kThreads)
    pooled_gate_kernel(const __grid_constant__ PooledGate p, const __grid_constant__ RowIndex index) {
  const int64_t rows = index.rows;
  const int column = R::column();
  for (int64_t round = 0; round * R::step() < rows; ++round) {
    const int64_t row = round * R::step() + R::first();
    const bool there = row < rows && column < p.D;
    float sum = 0.f;
    if (there) {
      const auto total = load<kPack>(static_cast<const typename R::T*>(p.total) + row * p.D + column);
      const float of = 1.f / static_cast<float>(index.token_of(row) + 1);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum += sigmoid(total.at[i] * of);
    }
    sum = R::sum(sum);
    if (there && column == 0) p.beta[row] = sum / static_cast<float>(p.D);
  }
}

template <class R>
__global__ void __launch_bounds__(kThreads)
    pooled_gate_backward_kernel(const __grid_constant__ PooledGateBackward p,
                                const __grid_constant__ RowIndex index) {
  using T = typename R::T;
  const int64_t rows = index.rows;
  const int column = R::column();
  if (column >= p.D) return;
  for (int64_t row = R::first(); row < rows; row += R::step()) {
    auto total = load<kPack>(static_cast<const T*>(p.total) + row * p.D + column);
    const float of = 1.f / static_cast<float>(index.token_of(row) + 1);
    const float dbeta = p.dbeta[row] * of / static_cast<float>(p.D);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float s = sigmoid(total.at[i] * of);
      total.at[i] = dbeta * s * (1.f - s);
    }
    store(static_cast<T*>(p.dtotal) + row * p.D + column, total);
  }
}

}  // namespace
}  // namespace linear_path

cudaError_t pooled_gate(const PooledGate& p, cudaStream_t stream) {
  using namespace linear_path;
  const RowIndex index(p.batch, p.tokens, p.heads);
  return with_rows(index, p.D, p.dtype, [&](auto rows) {
    using R = decltype(rows);
    pooled_gate_kernel<R><<<index.blocks<R>(), kThreads, 0, stream>>>(p, index);
  });
}

cudaError_t pooled_gate_backward(const PooledGateBackward& p, cudaStream_t stream) {
  using namespace linear_path;
  const RowIndex index(p.batch, p.tokens, p.heads);
  return with_rows(index, p.D, p.dtype, [&](auto rows) {
    using R = decltype(rows);
    pooled_gate_backward_kernel<R><<<index.blocks<R>(), kThreads, 0, stream>>>(p, index);
  });
}

}  // namespace girih::kernels

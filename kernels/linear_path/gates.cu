// The gates of a linear path and their gradients, with s = sigmoid(total / (t + 1)) at token t:
//
//     pooled gate     beta = mean of s over D        dtotal = dbeta s (1 - s) / (D (t + 1))
//     channel gate    beta = s                       dtotal = s (1 - s) / (t + 1) (sum of dbeta over the n
//     rows)
//
// A few lanes have the row of one token and head, and for the channel gate its n equal rows of beta.
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
    const bool exists = row < rows && column < p.D;
    float sum = 0.f;
    if (exists) {
      const auto total = load<kPack>(static_cast<const typename R::T*>(p.total) + row * p.D + column);
      const float per_count = 1.f / static_cast<float>(index.token_of(row) + 1);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum += sigmoid(total.at[i] * per_count);
    }
    sum = R::sum(sum);
    if (exists && column == 0) p.beta[row] = sum / static_cast<float>(p.D);
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
    const float per_count = 1.f / static_cast<float>(index.token_of(row) + 1);
    const float dbeta = p.dbeta[row] * per_count / static_cast<float>(p.D);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float s = sigmoid(total.at[i] * per_count);
      total.at[i] = dbeta * s * (1.f - s);
    }
    store(static_cast<T*>(p.dtotal) + row * p.D + column, total);
  }
}

// The factor 1 / (t + 1) of a row of total, and the offsets of its n rows in beta: first + j stride.
struct GateRow {
  float per_count;
  int64_t first, stride;

  __device__ GateRow(const RowIndex& index, int64_t row, int heads, int D, int n) {
    const auto [token, head] = index.heads.divmod(row);
    per_count = 1.f / static_cast<float>(index.tokens.divmod(token).remainder + 1);
    stride = static_cast<int64_t>(heads) * D;
    first = static_cast<int64_t>(token) * n * stride + static_cast<int64_t>(head) * D;
  }
};

template <class R>
__global__ void __launch_bounds__(kThreads)
    channel_gate_kernel(const __grid_constant__ ChannelGate p, const __grid_constant__ RowIndex index) {
  using T = typename R::T;
  const int column = R::column();
  if (column >= p.D) return;
  for (int64_t row = R::first(); row < index.rows; row += R::step()) {
    const GateRow gate_row(index, row, p.heads, p.D, p.n);
    auto total = load<kPack>(static_cast<const T*>(p.total) + row * p.D + column);
#pragma unroll
    for (int i = 0; i < kPack; ++i) total.at[i] = sigmoid(total.at[i] * gate_row.per_count);
    T* const to = static_cast<T*>(p.beta) + gate_row.first + column;
    for (int j = 0; j < p.n; ++j) store(to + j * gate_row.stride, total);
  }
}

template <class R>
__global__ void __launch_bounds__(kThreads)
    channel_gate_backward_kernel(const __grid_constant__ ChannelGateBackward p,
                                 const __grid_constant__ RowIndex index) {
  using T = typename R::T;
  const int column = R::column();
  if (column >= p.D) return;
  for (int64_t row = R::first(); row < index.rows; row += R::step()) {
    const GateRow gate_row(index, row, p.heads, p.D, p.n);
    auto total = load<kPack>(static_cast<const T*>(p.total) + row * p.D + column);
    auto sum = zeros<kPack>();
    const T* const from = static_cast<const T*>(p.dbeta) + gate_row.first + column;
    for (int j = 0; j < p.n; ++j) {
      const auto dbeta = load<kPack>(from + j * gate_row.stride);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum.at[i] += dbeta.at[i];
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float s = sigmoid(total.at[i] * gate_row.per_count);
      total.at[i] = sum.at[i] * gate_row.per_count * s * (1.f - s);
    }
    store(static_cast<T*>(p.dtotal) + row * p.D + column, total);
  }
}

template <class Gate, class KernelOf>
cudaError_t launch(const Gate& p, cudaStream_t stream, const KernelOf& kernel_of) {
  const RowIndex index(p.batch, p.tokens, p.heads);
  return dispatch_rows(index, p.D, p.dtype, [&](auto rows) {
    return launch_grid(kernel_of(rows), index.blocks<decltype(rows)>(), kThreads, 0, stream, p, index);
  });
}

}  // namespace
}  // namespace linear_path

cudaError_t pooled_gate(const PooledGate& p, cudaStream_t stream) {
  using namespace linear_path;
  return launch(p, stream, [](auto rows) { return pooled_gate_kernel<decltype(rows)>; });
}

cudaError_t pooled_gate_backward(const PooledGateBackward& p, cudaStream_t stream) {
  using namespace linear_path;
  return launch(p, stream, [](auto rows) { return pooled_gate_backward_kernel<decltype(rows)>; });
}

cudaError_t channel_gate(const ChannelGate& p, cudaStream_t stream) {
  using namespace linear_path;
  if (p.n < 1) return cudaErrorInvalidValue;
  return launch(p, stream, [](auto rows) { return channel_gate_kernel<decltype(rows)>; });
}

cudaError_t channel_gate_backward(const ChannelGateBackward& p, cudaStream_t stream) {
  using namespace linear_path;
  if (p.n < 1) return cudaErrorInvalidValue;
  return launch(p, stream, [](auto rows) { return channel_gate_backward_kernel<decltype(rows)>; });
}

}  // namespace girih::kernels

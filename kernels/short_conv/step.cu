// One token of decoding: y = act(bias + sum_j weight_j [state, x]_j), then state <- its last W - 2 rows and
// x.
//
// A thread owns N channels of one sequence, so it may overwrite the state it has read.
#include "short_conv/window.h"
#include "tile/grid.h"

namespace girih::kernels {
namespace short_conv {
namespace {

constexpr int kThreads = 128;

template <typename T, int W, int N>
__global__ void __launch_bounds__(kThreads) step(const ShortConvStep p) {
  const int64_t packs = p.shape.channels / N;
  const int64_t jobs = packs * p.shape.tokens.batch;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kThreads;
  const In<3> state{p.state.data, p.state.dtype, {p.state.stride[0], p.state.stride[1], p.state.stride[2]}};
  for (int64_t job = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; job < jobs; job += grid) {
    const int64_t channel = job % packs * N;
    const int64_t batch = job / packs;
    const Filter<W, N> filter(p.weight, p.bias, channel, p.shape.silu);
    Pack<N> window[W];
#pragma unroll
    for (int j = 0; j + 1 < W; ++j) window[j] = load_at<T, N>(state, batch, j, channel);
    window[W - 1] = load_at<T, N>(p.x, batch, 0, channel);
    store_at<T, N>(p.y, batch, 0, channel, filter.activate(filter.apply(window)));
#pragma unroll
    for (int j = 0; j + 1 < W; ++j) store_at<T, N>(p.state, batch, j, channel, window[j + 1]);
  }
}

}  // namespace
}  // namespace short_conv

cudaError_t short_conv_step(const ShortConvStep& p, cudaStream_t stream) {
  using namespace short_conv;
  return with_instance(p.shape, all_fit_packs(p.shape, p.x, p.state, p.y), [&](auto instance) {
    using I = decltype(instance);
    const int64_t jobs = p.shape.channels / I::N * p.shape.tokens.batch;
    if (jobs == 0) return cudaSuccess;
    step<typename I::T, I::W, I::N><<<blocks_for(divide_up(jobs, kThreads)), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace girih::kernels

// One token of decoding: y = act(bias + sum_j weight_j [state, x]_j), then state = the last W - 1 rows of
// [state, x].
//
// A thread has N channels of one sequence, so no other thread reads the state that the thread overwrites.
#include "short_conv/window.h"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace short_conv {
namespace {

constexpr int kStepThreads = 128;

template <typename T, int W, int N>
__global__ void __launch_bounds__(kStepThreads) step(const ShortConvStep p) {
  const int64_t packs = p.shape.channels / N;
  const int64_t jobs = packs * p.shape.tokens.batch;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kStepThreads;
  for (int64_t job = static_cast<int64_t>(blockIdx.x) * kStepThreads + threadIdx.x; job < jobs; job += grid) {
    const int64_t channel = job % packs * N;
    const int64_t batch = job / packs;
    // All loads of the thread are issued before the first use of a value.
    RawPack<T, N> rows[W];
#pragma unroll
    for (int j = 0; j + 1 < W; ++j) rows[j].load(&at<T>(p.state, batch, j, channel));
    rows[W - 1].load(&at<T>(p.x, batch, 0, channel));
    const RawFilter<W, N> taps(p.weight, p.bias, channel);

    const Filter<T, W, N> filter(taps, p.weight.dtype, p.bias.dtype, p.shape.silu);
    Pack<N> window[W];
#pragma unroll
    for (int j = 0; j < W; ++j) window[j] = rows[j].pack();
    Pack<N> z[1] = {filter.apply(window)};
    filter.activate(z);
    store(&at<T>(p.y, batch, 0, channel), z[0]);
#pragma unroll
    for (int j = 0; j + 1 < W; ++j) rows[j + 1].store(&at<T>(p.state, batch, j, channel));
  }
}

}  // namespace
}  // namespace short_conv

cudaError_t short_conv_step(const ShortConvStep& p, cudaStream_t stream) {
  using namespace short_conv;
  return dispatch_instance(p.shape, are_pack_aligned(p.shape, p.x, p.state, p.y), [&](auto instance) {
    using I = decltype(instance);
    const int64_t jobs = p.shape.channels / I::N * p.shape.tokens.batch;
    if (jobs == 0) return cudaSuccess;
    return launch_grid<step<typename I::T, I::W, I::N>>(clamp_grid_blocks(divide_up(jobs, kStepThreads)),
                                                        kStepThreads, 0, stream, p);
  });
}

}  // namespace girih::kernels

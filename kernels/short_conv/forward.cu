// y_t = act(bias + sum_j weight_j x_{t - (W-1) + j}) and the last W - 1 inputs of every sequence.
//
// A thread owns N channels and a tile of 16 tokens and slides the window over them in registers; neighbouring
// threads own neighbouring channels. The W - 1 inputs before a tile are read again by the tile's thread.
#include "short_conv/window.h"
#include "tile/grid.h"

namespace girih::kernels {
namespace short_conv {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 16;

template <typename T, int W, int N>
__global__ void __launch_bounds__(kThreads) forward(const ShortConvForward p) {
  const Tokens& all = p.shape.tokens;
  const int64_t packs = p.shape.channels / N;
  const int64_t tiles = divide_up(all.tokens, kTile);
  const int64_t jobs = packs * tiles * all.batch;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t job = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; job < jobs; job += grid) {
    const int64_t channel = job % packs * N;
    const int64_t batch = job / packs / tiles;
    int64_t token = job / packs % tiles * kTile;
    const int64_t tile_end = min(token + kTile, all.tokens);
    const Filter<W, N> filter(p.weight, p.bias, channel, p.shape.silu);

    while (token < tile_end) {
      const Sequence sequence = sequence_of(all, batch, token);
      const int64_t stop = min(sequence.end, tile_end);
      if (!sequence.inside) {
        for (; token < stop; ++token) store_at<T, N>(p.y, batch, token, channel, zeros<N>());
        continue;
      }
      Pack<N> window[W];
#pragma unroll
      for (int j = 1; j < W; ++j) {
        window[j] = input_at<T, W, N>(p.x, p.state, sequence, token - W + j, channel);
      }
#pragma unroll 4
      for (; token < stop; ++token) {
        shift<W, N>(window);
        window[W - 1] = load_at<T, N>(p.x, batch, token, channel);
        store_at<T, N>(p.y, batch, token, channel, filter.activate(filter.apply(window)));
      }
    }
  }
}

// Row r of the final state is the input at end - (W-1) + r; a sequence shorter than that hands on its first
// state.
template <typename T, int W>
__global__ void __launch_bounds__(kThreads) final_state(const ShortConvForward p) {
  const int64_t channels = p.shape.channels;
  const int64_t jobs = p.shape.tokens.sequences * (W - 1) * channels;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t job = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; job < jobs; job += grid) {
    const int64_t channel = job % channels;
    const int64_t row = job / channels % (W - 1);
    const Sequence sequence = sequence_at(p.shape.tokens, job / channels / (W - 1));
    store_at<T, 1>(p.final_state, sequence.index, row, channel,
                   input_at<T, W, 1>(p.x, p.state, sequence, sequence.end - (W - 1) + row, channel));
  }
}

}  // namespace
}  // namespace short_conv

cudaError_t short_conv_forward(const ShortConvForward& p, cudaStream_t stream) {
  using namespace short_conv;
  const Tokens& all = p.shape.tokens;
  return with_instance(p.shape, all_fit_packs(p.shape, p.x, p.state, p.y), [&](auto instance) {
    using I = decltype(instance);
    using T = typename I::T;
    const int64_t jobs = p.shape.channels / I::N * divide_up(all.tokens, kTile) * all.batch;
    if (jobs > 0) {
      forward<T, I::W, I::N><<<blocks_for(divide_up(jobs, kThreads)), kThreads, 0, stream>>>(p);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    if constexpr (I::W > 1) {
      const int64_t rows = all.sequences * (I::W - 1) * p.shape.channels;
      if (rows > 0) {
        final_state<T, I::W><<<blocks_for(divide_up(rows, kThreads)), kThreads, 0, stream>>>(p);
        return cudaGetLastError();
      }
    }
    return cudaSuccess;
  });
}

}  // namespace girih::kernels

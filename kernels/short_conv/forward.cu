// y_t = act(bias + sum_j weight_j x_{t - (W-1) + j}) and the last W - 1 inputs of every sequence.
//
// A thread has N channels and a run of tokens. The thread also reads the W - 1 inputs before its run.
#include "short_conv/window.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace short_conv {
namespace {

// Blocks of a multiprocessor, with 64 or 80 registers for each thread.
constexpr int blocks_per_multiprocessor(int pack) { return pack == 1 ? 4 : 3; }

// Computes y of the `count` tokens from `first` that one sequence has in a run.
template <typename T, int W, int N>
__device__ void run_forward(const ShortConvForward& p, const Filter<T, W, N>& filter,
                            const Sequence& sequence, int64_t first, int count, int64_t channel) {
  using Reader = RegisterReader<T, N, 1>;
  constexpr int kTileRows = Reader::kTileRows;
  Reader rows({{&at<T>(p.x, sequence.batch, first, channel), p.x.stride[1]}}, count);
  const int64_t y_stride = p.y.stride[1];
  T* y = &at<T>(p.y, sequence.batch, first, channel);
  Pack<N> window[W - 1 + kTileRows];  // x_{t - (W-1)}, ...
#pragma unroll
  for (int j = 0; j + 1 < W; ++j) {
    window[j] = input_at<T, W, N>(p.x, p.state, sequence, first - (W - 1) + j, channel);
  }
  const auto tile = [&](int t, auto all) {
    constexpr bool is_full = decltype(all)::value;
    typename Reader::RowTile raw;
    rows.next(raw, count - t);
    Pack<N> z[kTileRows];
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) window[W - 1 + i] = raw[0][i].pack();
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) z[i] = filter.apply(window + i);
    filter.activate(z);
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      if (is_full || t + i < count) store(y + i * y_stride, z[i]);
    }
    y += kTileRows * y_stride;
#pragma unroll
    for (int j = 0; j + 1 < W; ++j) window[j] = window[kTileRows + j];
  };
  int t = 0;
#pragma unroll 1
  for (; t + kTileRows <= count; t += kTileRows) tile(t, std::true_type());
  if (t < count) tile(t, std::false_type());
}

// Row r of the final state is the input at position end - (W-1) + r. A sequence of fewer than W - 1 tokens
// copies rows of its initial state.
template <typename T, int W>
__device__ void store_final_state(const ShortConvForward& p, int64_t job) {
  const int64_t channels = p.shape.channels;
  if (job >= p.shape.tokens.sequences * (W - 1) * channels) return;
  const int64_t channel = job % channels;
  const int64_t row = job / channels % (W - 1);
  const Sequence sequence = sequence_at(p.shape.tokens, job / channels / (W - 1));
  store(&at<T>(p.final_state, sequence.index, row, channel),
        input_at<T, W, 1>(p.x, p.state, sequence, sequence.end - (W - 1) + row, channel));
}

// The first blocks compute the final states. A separate kernel for them takes 3 us, and placing them after
// the blocks of the runs adds 0.9 us.
template <typename T, int W, int N>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(N))
    forward(const ShortConvForward p, const int run_length, const unsigned state_blocks) {
  if (blockIdx.x < state_blocks) {
    if constexpr (W > 1) {
      store_final_state<T, W>(p, int64_t{blockIdx.x} * kThreads + threadIdx.y * kLanes + threadIdx.x);
    }
    return;
  }
  const ThreadWork<N> job(p.shape, blockIdx.x - state_blocks, run_length);
  job.template prefetch_first<T>(p.x);
  const Filter<T, W, N> filter(p.weight, p.bias, job.first_channel, p.shape.channels, p.shape.silu);
  job.for_each_sequence(p.shape.tokens, [&](const Sequence& sequence, int64_t first, int64_t last) {
    if (sequence.is_owned) {
      run_forward<T, W, N>(p, filter, sequence, first, static_cast<int>(last - first), job.channel);
    } else {
      for (int64_t t = first; t < last; ++t) store(&at<T>(p.y, job.batch, t, job.channel), zeros<N>());
    }
  });
}

}  // namespace
}  // namespace short_conv

cudaError_t short_conv_forward(const ShortConvForward& p, cudaStream_t stream) {
  using namespace short_conv;
  const SequenceLayout& layout = p.shape.tokens;
  return dispatch_instance(p.shape, are_pack_aligned(p.shape, p.x, p.state, p.y), [&](auto instance) {
    using I = decltype(instance);
    const int length = run_length(p.shape, I::N, blocks_per_multiprocessor(I::N));
    const int64_t state_blocks = divide_up(layout.sequences * (I::W - 1) * p.shape.channels, kThreads);
    const int64_t blocks =
        state_blocks + divide_up(p.shape.channels, kLanes * I::N) * run_group_count(layout, length);
    if (blocks == 0) return cudaSuccess;
    if (blocks > 0x7fffffff / kRuns) return cudaErrorInvalidConfiguration;
    return launch_grid<forward<typename I::T, I::W, I::N>>(blocks, dim3(kLanes, kRuns), 0, stream, p, length,
                                                           static_cast<unsigned>(state_blocks));
  });
}

}  // namespace girih::kernels

// The gradients, with z recomputed from x:
//
//     dz_t = dy_t act'(z_t)
//     dx_s = sum_j weight_j dz_{s + (W-1) - j} + dfinal_state_{s - (end - (W-1))}      dz is 0 from the end
//     dweight_j = sum_t dz_t x_{t - (W-1) + j}        dbias = sum_t dz_t
//
// dstate is dx at the W - 1 positions before the start.
//
// A thread owns N channels and a run of 32 tokens and reads W - 1 tokens beyond it, whose dz reach back into
// it. A block owns 32 packs of channels (x) and a group of 8 runs (y), flat over the batch; it adds up its
// threads' parts of dweight and dbias in order and writes one partial a group, and a second kernel adds the
// partials in order.
#include "short_conv/window.h"
#include "tile/grid.h"

namespace girih::kernels {
namespace short_conv {
namespace {

constexpr int kLanes = 32;
constexpr int kRuns = 8;
constexpr int kRun = 32;
constexpr int kThreads = kLanes * kRuns;

__host__ __device__ int64_t groups(const Tokens& all) {
  return divide_up(divide_up(all.tokens, kRun) * all.batch, kRuns);
}

// dx over the tokens of one run that one sequence owns, first..last - 1; adds to dweight and dbias.
template <typename T, int W, int N>
__device__ void run_backward(const ShortConvBackward& p, const Filter<W, N>& filter, const Sequence& sequence,
                             int64_t first, int64_t last, int64_t channel, Pack<N> (&dweight)[W],
                             Pack<N>& dbias) {
  Pack<N> window[W], dx[W];  // inputs, and their gradients so far, at t - (W-1)..t
#pragma unroll
  for (int j = 0; j < W; ++j) dx[j] = zeros<N>();
#pragma unroll
  for (int j = 1; j < W; ++j) {
    window[j] = input_at<T, W, N>(p.x, p.state, sequence, first - W + j, channel);
  }
  for (int64_t t = first; t < last + W - 1; ++t) {
    shift<W, N>(window);
    shift<W, N>(dx);
    dx[W - 1] = zeros<N>();
    if (t < sequence.end && p.dy.data != nullptr) {
      window[W - 1] = load_at<T, N>(p.x, sequence.batch, t, channel);
      // dz_t = dy_t act'(z_t)
      const Pack<N> dz =
          filter.activation_gradient(filter.apply(window), load_at<T, N>(p.dy, sequence.batch, t, channel));
      const bool own = t < last;
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          dx[j].at[i] += filter.weight[j].at[i] * dz.at[i];
          if (own) dweight[j].at[i] += dz.at[i] * window[j].at[i];
        }
        if (own) dbias.at[i] += dz.at[i];
      }
    }
    // No later token reaches back to t - (W-1).
    const int64_t done = t - (W - 1);
    if (done < first) continue;
    const int64_t row = done - (sequence.end - (W - 1));
    if (row >= 0 && p.dfinal_state.data != nullptr) {
      const Pack<N> through_state = load_at<T, N>(p.dfinal_state, sequence.index, row, channel);
#pragma unroll
      for (int i = 0; i < N; ++i) dx[0].at[i] += through_state.at[i];
    }
    store_at<T, N>(p.dx, sequence.batch, done, channel, dx[0]);
  }
}

template <typename T, int W, int N>
__global__ void __launch_bounds__(kThreads) backward(const ShortConvBackward p) {
  __shared__ float parts[kRuns][kLanes * N];
  const Tokens& all = p.shape.tokens;
  const int64_t runs = divide_up(all.tokens, kRun);
  const int64_t blocks_of_channels = divide_up(p.shape.channels, kLanes * N);
  const int64_t jobs = blocks_of_channels * groups(all);
  const int thread = threadIdx.y * kLanes + threadIdx.x;
  for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int64_t first_channel = job % blocks_of_channels * (kLanes * N);
    const int64_t channel = first_channel + threadIdx.x * N;
    const int64_t group = job / blocks_of_channels;
    const int64_t run = group * kRuns + threadIdx.y;
    Pack<N> dweight[W], dbias = zeros<N>();
#pragma unroll
    for (int j = 0; j < W; ++j) dweight[j] = zeros<N>();

    if (channel < p.shape.channels && run < runs * all.batch) {
      const Filter<W, N> filter(p.weight, p.bias, channel, p.shape.silu);
      const int64_t batch = run / runs;
      int64_t token = run % runs * kRun;
      const int64_t run_end = min(token + kRun, all.tokens);
      while (token < run_end) {
        const Sequence sequence = sequence_of(all, batch, token);
        const int64_t stop = min(sequence.end, run_end);
        if (sequence.inside) {
          run_backward<T, W, N>(p, filter, sequence, token, stop, channel, dweight, dbias);
        } else {
          for (int64_t t = token; t < stop; ++t) store_at<T, N>(p.dx, batch, t, channel, zeros<N>());
        }
        token = stop;
      }
    }

    // partials [groups, W + 1, channels]: the taps, then the bias
#pragma unroll
    for (int j = 0; j <= W; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        parts[threadIdx.y][threadIdx.x * N + i] = j < W ? dweight[j < W ? j : 0].at[i] : dbias.at[i];
      }
      __syncthreads();  // every thread's part stands in shared memory
      if (thread < kLanes * N && first_channel + thread < p.shape.channels) {
        float sum = 0.f;
#pragma unroll
        for (int y = 0; y < kRuns; ++y) sum += parts[y][thread];
        p.partials[(group * (W + 1) + j) * p.shape.channels + first_channel + thread] = sum;
      }
      __syncthreads();  // read before the next tap overwrites it
    }
  }
}

// The partials' sum: a thread adds every eighth group, then eight threads' sums are added, always in this
// order.
__global__ void __launch_bounds__(kThreads) sum_partials(const ShortConvBackward p) {
  __shared__ float parts[kRuns][kLanes];
  const int64_t channels = p.shape.channels;
  const int64_t columns = (p.shape.width + 1) * channels;
  const int64_t count = groups(p.shape.tokens);
  for (int64_t block = blockIdx.x; block * kLanes < columns; block += gridDim.x) {
    const int64_t column = block * kLanes + threadIdx.x;
    float sum = 0.f;
    if (column < columns) {
      for (int64_t group = threadIdx.y; group < count; group += kRuns)
        sum += p.partials[group * columns + column];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // every thread's part stands in shared memory
    if (threadIdx.y == 0 && column < columns) {
      float total = 0.f;
#pragma unroll
      for (int y = 0; y < kRuns; ++y) total += parts[y][threadIdx.x];
      const int64_t tap = column / channels, channel = column % channels;
      if (tap < p.shape.width) {
        store_any(p.dweight.data, p.dweight.dtype, channel * p.dweight.stride[0] + tap * p.dweight.stride[1],
                  total);
      } else if (p.dbias.data != nullptr) {
        store_any(p.dbias.data, p.dbias.dtype, channel * p.dbias.stride[0], total);
      }
    }
    __syncthreads();  // read before the next columns overwrite it
  }
}

// Row r of the state is the position start - (W-1) + r: tap j <= r of token start + r - j reads it, and a
// sequence of fewer than W - 1 tokens hands it on to its final state.
template <typename T, int W>
__global__ void __launch_bounds__(kThreads) state_backward(const ShortConvBackward p) {
  const int64_t channels = p.shape.channels;
  const int64_t jobs = p.shape.tokens.sequences * (W - 1) * channels;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t job = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; job < jobs; job += grid) {
    const int64_t channel = job % channels;
    const int row = static_cast<int>(job / channels % (W - 1));
    const Sequence sequence = sequence_at(p.shape.tokens, job / channels / (W - 1));
    const Filter<W, 1> filter(p.weight, p.bias, channel, p.shape.silu);
    Pack<1> dstate = zeros<1>();
#pragma unroll
    for (int j = 0; j + 1 < W; ++j) {
      const int64_t t = sequence.start + row - j;
      if (j > row || t >= sequence.end || p.dy.data == nullptr) continue;
      Pack<1> window[W];
#pragma unroll
      for (int i = 0; i < W; ++i) {
        window[i] = input_at<T, W, 1>(p.x, p.state, sequence, t - (W - 1) + i, channel);
      }
      const Pack<1> dz =
          filter.activation_gradient(filter.apply(window), load_at<T, 1>(p.dy, sequence.batch, t, channel));
      dstate.at[0] += filter.weight[j].at[0] * dz.at[0];
    }
    const int64_t handed_on = row - (sequence.end - sequence.start);
    if (handed_on >= 0 && p.dfinal_state.data != nullptr) {
      dstate.at[0] += load_at<T, 1>(p.dfinal_state, sequence.index, handed_on, channel).at[0];
    }
    store_at<T, 1>(p.dstate, sequence.index, row, channel, dstate);
  }
}

}  // namespace
}  // namespace short_conv

int64_t short_conv_partials(const ShortConvShape& shape) {
  return short_conv::groups(shape.tokens) * (shape.width + 1) * shape.channels;
}

cudaError_t short_conv_backward(const ShortConvBackward& p, cudaStream_t stream) {
  using namespace short_conv;
  const Tokens& all = p.shape.tokens;
  if (p.shape.channels == 0) return cudaSuccess;
  const dim3 threads(kLanes, kRuns);
  const bool packs = all_fit_packs(p.shape, p.dy, p.dfinal_state, p.x, p.state, p.dx);
  return with_instance(p.shape, packs, [&](auto instance) {
    using I = decltype(instance);
    using T = typename I::T;
    const int64_t jobs = divide_up(p.shape.channels, kLanes * I::N) * groups(all);
    if (jobs > 0) {
      backward<T, I::W, I::N><<<blocks_for(jobs), threads, 0, stream>>>(p);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    const int64_t columns = (I::W + 1) * p.shape.channels;
    sum_partials<<<blocks_for(divide_up(columns, kLanes)), threads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    if constexpr (I::W > 1) {
      const int64_t rows = all.sequences * (I::W - 1) * p.shape.channels;
      if (rows > 0 && p.dstate.data != nullptr) {
        state_backward<T, I::W><<<blocks_for(divide_up(rows, kThreads)), kThreads, 0, stream>>>(p);
        return cudaGetLastError();
      }
    }
    return cudaSuccess;
  });
}

}  // namespace girih::kernels

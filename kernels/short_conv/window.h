// What forward, backward and step share: the filter of a thread's channels, the inputs under it, the choice
// of an instance. A thread owns N neighbouring channels.
#pragma once

#include <algorithm>

#include "short_conv/short_conv.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/matrix.h"
#include "tile/pack.h"
#include "tile/shared.h"
#include "tile/silu.h"

namespace girih::kernels::short_conv {

// Of forward and backward a block owns the channels of a warp's lanes (x) and some runs of tokens (y); a
// thread slides over its run in turns of a few tokens, while the next turns' rows are on their way.
constexpr int kLanes = 32;
constexpr int kRuns = 8;
constexpr int kThreads = kLanes * kRuns;

// The filters of N channels as they lie in memory: asked for, and not waited for.
template <int W, int N>
struct RawFilter {
  RawElement weight[W][N];
  RawElement bias[N];  // zeros where there is none

  __device__ RawFilter(const In<2>& weights, const In<1>& biases, int64_t channel) {
    with_stored(weights.dtype, [&](auto zero) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          weight[j][i] = load_stored<decltype(zero)>(weights.data, offset_of(weights, channel + i, j));
        }
      }
    });
    if (biases.data == nullptr) return;
    with_stored(biases.dtype, [&](auto zero) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        bias[i] = load_stored<decltype(zero)>(biases.data, offset_of(biases, channel + i));
      }
    });
  }
};

template <typename T, int W, int N>
struct Filter {
  Pack<N> weight[W];
  Pack<N> bias;
  bool silu;

  __device__ Filter(const RawFilter<W, N>& raw, DType of_weights, DType of_biases, bool with_silu)
      : silu(with_silu) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < W; ++j) weight[j].at[i] = value_of(raw.weight[j][i], of_weights);
      bias.at[i] = value_of(raw.bias[i], of_biases);
    }
  }

  // The filters of a block's channels, of which there are `channels`, by way of shared memory: a thread's own
  // are W N loads apart from its neighbours'. The whole block takes part.
  __device__ Filter(const In<2>& weights, const In<1>& biases, int64_t first_channel, int64_t channels,
                    bool with_silu)
      : silu(with_silu) {
    constexpr int kColumns = kLanes * N;
    __shared__ __align__(16) float place[W + 1][kColumns];
    const int column = threadIdx.y * kLanes + threadIdx.x;
    if (column < kColumns && first_channel + column < channels) {  // its loads are under way together
#pragma unroll
      for (int j = 0; j < W; ++j) place[j][column] = load_any(weights, first_channel + column, j);
      place[W][column] = biases.data == nullptr ? 0.f : load_any(biases, first_channel + column);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < W; ++j) weight[j] = load<N>(&place[j][threadIdx.x * N]);
    bias = load<N>(&place[W][threadIdx.x * N]);
  }

  // z_t = bias + sum_j weight_j x_{t - (W-1) + j}, window: from x_{t - (W-1)} on
  __device__ Pack<N> apply(const Pack<N>* window) const {
    Pack<N> z = bias;
#pragma unroll
    for (int j = 0; j < W; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) z.at[i] += weight[j].at[i] * window[j].at[i];
    }
    return z;
  }

  // y = z sigmoid(z), of Count packs: one branch, or their latencies would add up
  template <int Count>
  __device__ void activate(Pack<N> (&z)[Count]) const {
    if (!silu) return;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) z[k].at[i] *= sigmoid_for<T>(z[k].at[i]);
    }
  }

  // dy becomes dz = dy s (1 + z (1 - s)), s = sigmoid(z)
  template <int Count>
  __device__ void differentiate(Pack<N> (&dy)[Count], const Pack<N> (&z)[Count]) const {
    if (!silu) return;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float s = sigmoid_for<T>(z[k].at[i]);
        dy[k].at[i] *= s * (1.f + z[k].at[i] * (1.f - s));
      }
    }
  }
};

template <typename T>
__device__ inline const T& at(const In<3>& array, int64_t a, int64_t b, int64_t c) {
  return static_cast<const T*>(array.data)[offset_of(array, a, b, c)];
}

template <typename T>
__device__ inline T& at(const Out<3>& array, int64_t a, int64_t b, int64_t c) {
  return static_cast<T*>(array.data)[offset_of(array, a, b, c)];
}

// The input at a token of a sequence; the W - 1 positions before its start are its state's rows.
template <typename T, int W, int N>
__device__ inline Pack<N> input_at(const In<3>& x, const In<3>& state, const Sequence& sequence,
                                   int64_t token, int64_t channel) {
  if (token >= sequence.start) return load<N>(&at<T>(x, sequence.batch, token, channel));
  if (state.data == nullptr) return zeros<N>();
  return load<N>(&at<T>(state, sequence.index, token - sequence.start + (W - 1), channel));
}

// Tokens of a run, from the sizes alone: what gives one wave of `blocks` blocks a multiprocessor (132, an
// H200's), or as many whole waves as keep runs to about kLongest. Of 4 x 4096 tokens of 2048 channels in
// bf16, forward takes 47.6 us in 2.6 waves (runs of 32) and 43.4 in one (88), backward 75.4 in 1.9 (64) and
// 67.6 in one (128). What does not fill a wave has shorter runs, which are through sooner.
inline int run_length(const ShortConvShape& shape, int pack, int blocks) {
  constexpr int64_t kShortest = 8, kLongest = 128, kMultiprocessors = 132;
  const int64_t batch = std::max<int64_t>(shape.tokens.batch, 1), tokens = shape.tokens.tokens;
  const int64_t across = std::max<int64_t>(divide_up(shape.channels, kLanes * pack), 1);
  const int64_t wave = kMultiprocessors * blocks;
  const int64_t waves = divide_up(batch * tokens * across, wave * kRuns * kLongest);
  const int64_t groups = std::max<int64_t>(waves * wave / across, 1);
  const int64_t runs = std::max<int64_t>(groups * kRuns / batch, 1);  // of a row
  return static_cast<int>(std::max(divide_up(divide_up(tokens, runs), 4) * 4, kShortest));
}

// Which channels and tokens a thread has, by the number of its block.
template <int N>
struct Job {
  int64_t first_channel, channel;
  unsigned group;  // of kRuns runs
  int64_t batch;
  int64_t token, run_end;
  bool exists;

  __device__ Job(const ShortConvShape& shape, unsigned block, int run_length) {
    // 32 bits: a division of 64 costs as much as four tokens.
    const auto across = static_cast<unsigned>(divide_up(shape.channels, kLanes * N));
    first_channel = int64_t{block % across} * (kLanes * N);
    channel = first_channel + threadIdx.x * N;
    group = block / across;
    const auto runs = static_cast<unsigned>(divide_up(shape.tokens.tokens, run_length));
    const unsigned run = group * kRuns + threadIdx.y;
    batch = run / runs;
    token = int64_t{run % runs} * run_length;
    run_end = min(token + run_length, shape.tokens.tokens);
    exists = channel < shape.channels && batch < shape.tokens.batch;
  }

  // What the thread reads first is on its way while the block fetches its filters.
  template <typename T>
  __device__ void prefetch_first(const In<3>& rows) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (exists && token + i < run_end) prefetch(&at<T>(rows, batch, token + i, channel));
    }
  }

  // f(sequence, first, last) for the parts of the run that one sequence owns, or none.
  template <class F>
  __device__ void for_each_sequence(const Tokens& all, const F& f) const {
    for (int64_t first = token; exists && first < run_end;) {
      const Sequence sequence = sequence_of(all, batch, first);
      const int64_t last = min(sequence.end, run_end);
      f(sequence, first, last);
      first = last;
    }
  }
};

// Blocks of kRuns runs.
__host__ __device__ inline int64_t groups_of_runs(const Tokens& all, int run_length) {
  return divide_up(divide_up(all.tokens, run_length) * all.batch, kRuns);
}

// A pack as it lies in memory. Its words are taken apart where they are used: elements of 16 bits would be
// as soon as they are loaded, and a load waited for.
template <typename T, int N>
struct Raw {
  static constexpr int kBytes = N * int(sizeof(T)), kWords = (kBytes + 3) / 4;

  uint32_t words[kWords];

  __device__ void load(const T* from) {
    if constexpr (kBytes == 2) {
      words[0] = *reinterpret_cast<const uint16_t*>(from);
    } else {
      const auto all = *reinterpret_cast<const Elements<uint32_t, kWords>*>(from);
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = all.at[i];
    }
  }
  __device__ void store(T* to) const {
    if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(words[0]);
    } else {
      Elements<uint32_t, kWords> all;
#pragma unroll
      for (int i = 0; i < kWords; ++i) all.at[i] = words[i];
      *reinterpret_cast<Elements<uint32_t, kWords>*>(to) = all;
    }
  }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0u;
  }
  __device__ Pack<N> pack() const {
    Pack<N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(T) == 4) {
        pack.at[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpaired<T>(words[i / 2]);
        pack.at[i] = i % 2 == 0 ? pair.x : pair.y;
      }
    }
    return pack;
  }
};

// The rows of a run in one array.
template <typename T>
struct Rows {
  const T* first;
  int64_t stride;
};

// Rows of `Arrays` arrays, kTurn of each at a time: while a turn is used the next is under way, in registers.
template <typename T, int N, int Arrays>
class Ahead {
 public:
  static constexpr int kTurn = 4;
  static constexpr int kBytes = 0;  // of shared memory
  using Turn = Raw<T, N>[Arrays][kTurn];

  // `count` rows, then zeros.
  __device__ Ahead(const Rows<T> (&rows)[Arrays], int count) {
#pragma unroll
    for (int a = 0; a < Arrays; ++a) rows_[a] = rows[a];
    fetch(count);
  }

  // left: rows from this turn on.
  __device__ void next(Turn& turn, int left) {
#pragma unroll
    for (int a = 0; a < Arrays; ++a) {
#pragma unroll
      for (int i = 0; i < kTurn; ++i) turn[a][i] = under_way_[a][i];
    }
    fetch(left - kTurn);
  }

 private:
  Rows<T> rows_[Arrays];
  Turn under_way_;

  __device__ void fetch(int left) {
#pragma unroll
    for (int a = 0; a < Arrays; ++a) {
#pragma unroll
      for (int i = 0; i < kTurn; ++i) {
        under_way_[a][i].clear();
        if (i < left) under_way_[a][i].load(rows_[a].first + i * rows_[a].stride);
      }
      rows_[a].first += kTurn * rows_[a].stride;
    }
  }
};

template <typename Element, int Width, int Channels>
struct Instance {
  using T = Element;
  static constexpr int W = Width;
  static constexpr int N = Channels;
};

// Channels a thread: 8 or 16 bytes an access.
constexpr int kPack = 4;

template <typename T, int N, typename Launch>
cudaError_t with_width(int width, const Launch& launch) {
  if (width < 1) return cudaErrorInvalidValue;
  return by_width<1, 2, 3, kShortConvMaxWidth>(
      width, [&](auto exactly) { return launch(Instance<T, exactly(), N>{}); });
}

// Calls launch(Instance) with the type, the width and the channels a thread; packs: every tensor fits them.
template <typename Launch>
cudaError_t with_instance(const ShortConvShape& shape, bool packs, const Launch& launch) {
  return by_element(shape.dtype, [&](auto element) {
    using T = decltype(element);
    return packs ? with_width<T, kPack>(shape.width, launch) : with_width<T, 1>(shape.width, launch);
  });
}

template <typename... Arrays>
bool all_fit_packs(const ShortConvShape& shape, const Arrays&... arrays) {
  return shape.channels % kPack == 0 && (fits_packs(arrays, kPack, bytes_of(shape.dtype)) && ...);
}

}  // namespace girih::kernels::short_conv

// Shared by forward, backward and step: the filter of N neighbouring channels of a thread, the inputs of the
// filter, and the choice of an instance.
#pragma once

#include <algorithm>

#include "short_conv/short_conv.h"
#include "tile/cuts.h"
#include "tile/grid.h"
#include "tile/instance.h"
#include "tile/matrix.h"
#include "tile/pack.h"
#include "tile/shared.h"
#include "tile/silu.h"

namespace girih::kernels::short_conv {

// In forward and backward, a block has the channels of the lanes of a warp (threadIdx.x) and kRuns runs of
// tokens (threadIdx.y). A thread moves a window over its run in tiles of a few tokens and loads the rows of
// later tiles in advance.
constexpr int kLanes = 32;
constexpr int kRuns = 8;
constexpr int kThreads = kLanes * kRuns;

// The filters of N channels in the type of memory; the loads may still be in flight.
template <int W, int N>
struct RawFilter {
  RawElement weight[W][N];
  RawElement bias[N];  // zero without a bias

  __device__ RawFilter(const InputTensor<2>& weights, const InputTensor<1>& biases, int64_t channel) {
    dispatch_storage(weights.dtype, [&](auto zero) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          weight[j][i] = load_raw<decltype(zero)>(weights.data, offset_of(weights, channel + i, j));
        }
      }
    });
    if (biases.data == nullptr) return;
    dispatch_storage(biases.dtype, [&](auto zero) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        bias[i] = load_raw<decltype(zero)>(biases.data, offset_of(biases, channel + i));
      }
    });
  }
};

template <typename T, int W, int N>
struct Filter {
  Pack<N> weight[W];
  Pack<N> bias;
  bool use_silu;

  __device__ Filter(const RawFilter<W, N>& raw, DType weight_dtype, DType bias_dtype, bool use_silu)
      : use_silu(use_silu) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < W; ++j) weight[j].at[i] = decode_element(raw.weight[j][i], weight_dtype);
      bias.at[i] = decode_element(raw.bias[i], bias_dtype);
    }
  }

  // Loads the filters of the channels of a block through shared memory, since direct loads of a warp have a
  // stride of W N elements. `channels` is the number of all channels. All threads of the block call this
  // constructor.
  __device__ Filter(const InputTensor<2>& weights, const InputTensor<1>& biases, int64_t first_channel,
                    int64_t channels, bool use_silu)
      : use_silu(use_silu) {
    constexpr int kColumns = kLanes * N;
    __shared__ __align__(16) float buffer[W + 1][kColumns];
    const int column = threadIdx.y * kLanes + threadIdx.x;
    if (column < kColumns && first_channel + column < channels) {  // all loads are in flight at once
#pragma unroll
      for (int j = 0; j < W; ++j) buffer[j][column] = load_element(weights, first_channel + column, j);
      buffer[W][column] = biases.data == nullptr ? 0.f : load_element(biases, first_channel + column);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < W; ++j) weight[j] = load<N>(&buffer[j][threadIdx.x * N]);
    bias = load<N>(&buffer[W][threadIdx.x * N]);
  }

  // z_t = bias + sum_j weight_j x_{t - (W-1) + j}; window[0] is x_{t - (W-1)}
  __device__ Pack<N> apply(const Pack<N>* window) const {
    Pack<N> z = bias;
#pragma unroll
    for (int j = 0; j < W; ++j) {
#pragma unroll
      for (int i = 0; i < N; ++i) z.at[i] += weight[j].at[i] * window[j].at[i];
    }
    return z;
  }

  // y = z sigmoid(z) for Count packs under one branch, so that their latencies overlap
  template <int Count>
  __device__ void activate(Pack<N> (&z)[Count]) const {
    if (!use_silu) return;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) z[k].at[i] *= sigmoid_for<T>(z[k].at[i]);
    }
  }

  // dz = dy s (1 + z (1 - s)) in place of dy, with s = sigmoid(z)
  template <int Count>
  __device__ void differentiate(Pack<N> (&dy)[Count], const Pack<N> (&z)[Count]) const {
    if (!use_silu) return;
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
__device__ inline const T& at(const InputTensor<3>& array, int64_t a, int64_t b, int64_t c) {
  return static_cast<const T*>(array.data)[offset_of(array, a, b, c)];
}

template <typename T>
__device__ inline T& at(const OutputTensor<3>& array, int64_t a, int64_t b, int64_t c) {
  return static_cast<T*>(array.data)[offset_of(array, a, b, c)];
}

// The input at a token of a sequence; the W - 1 positions before the start are rows of the state.
template <typename T, int W, int N>
__device__ inline Pack<N> input_at(const InputTensor<3>& x, const InputTensor<3>& state,
                                   const Sequence& sequence, int64_t token, int64_t channel) {
  if (token >= sequence.start) return load<N>(&at<T>(x, sequence.batch, token, channel));
  if (state.data == nullptr) return zeros<N>();
  return load<N>(&at<T>(state, sequence.index, token - sequence.start + (W - 1), channel));
}

// Tokens of a run, a function of the sizes only. The runs make one wave of `blocks` blocks for each
// multiprocessor (kH100Multiprocessors), or a whole number of waves with runs of about kLongest tokens. With
// 4 x 4096 tokens of 2048 channels in bf16, forward takes 47.6 us in 2.6 waves (runs of 32 tokens) and 43.4
// us in one wave (88), and backward 75.4 us in 1.9 waves (64) and 67.6 us in one (128). Calls too small for a
// wave have shorter runs, which finish sooner.
inline int run_length(const ShortConvShape& shape, int pack, int blocks) {
  constexpr int64_t kShortest = 8, kLongest = 128;
  const int64_t batch = std::max<int64_t>(shape.tokens.batch, 1), tokens = shape.tokens.tokens;
  const int64_t channel_blocks = std::max<int64_t>(divide_up(shape.channels, kLanes * pack), 1);
  const int64_t wave = int64_t{kH100Multiprocessors} * blocks;
  const int64_t waves = divide_up(batch * tokens * channel_blocks, wave * kRuns * kLongest);
  const int64_t groups = std::max<int64_t>(waves * wave / channel_blocks, 1);
  const int64_t runs = std::max<int64_t>(groups * kRuns / batch, 1);  // runs of a batch row
  return static_cast<int>(std::max(divide_up(divide_up(tokens, runs), 4) * 4, kShortest));
}

// The channels and tokens of a thread in block number `block`.
template <int N>
struct ThreadWork {
  int64_t first_channel, channel;
  unsigned group;  // kRuns runs
  int64_t batch;
  int64_t token, run_end;
  bool exists;

  __device__ ThreadWork(const ShortConvShape& shape, unsigned block, int run_length) {
    // 32-bit divisions: a 64-bit division takes as long as four tokens.
    const auto channel_blocks = static_cast<unsigned>(divide_up(shape.channels, kLanes * N));
    first_channel = int64_t{block % channel_blocks} * (kLanes * N);
    channel = first_channel + threadIdx.x * N;
    group = block / channel_blocks;
    const auto runs = static_cast<unsigned>(divide_up(shape.tokens.tokens, run_length));
    const unsigned run = group * kRuns + threadIdx.y;
    batch = run / runs;
    token = int64_t{run % runs} * run_length;
    run_end = min(token + run_length, shape.tokens.tokens);
    exists = channel < shape.channels && batch < shape.tokens.batch;
  }

  // Prefetches the first rows of the thread, before the block loads its filters.
  template <typename T>
  __device__ void prefetch_first(const InputTensor<3>& rows) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (exists && token + i < run_end) prefetch(&at<T>(rows, batch, token + i, channel));
    }
  }

  // Calls f(sequence, first, last) for every part of the run that belongs to one sequence, or to none.
  template <class F>
  __device__ void for_each_sequence(const SequenceLayout& layout, const F& f) const {
    for (int64_t first = token; exists && first < run_end;) {
      const Sequence sequence = sequence_of(layout, batch, first);
      const int64_t last = min(sequence.end, run_end);
      f(sequence, first, last);
      first = last;
    }
  }
};

// The number of groups of kRuns runs.
__host__ __device__ inline int64_t run_group_count(const SequenceLayout& layout, int run_length) {
  return divide_up(divide_up(layout.tokens, run_length) * layout.batch, kRuns);
}

// A pack in the type of memory, as 32-bit words. pack() unpacks the words at their use. With an array of
// 16-bit elements the compiler unpacks directly after the load, and waits for the load there.
template <typename T, int N>
struct RawPack {
  static constexpr int kBytes = N * int(sizeof(T)), kWords = (kBytes + 3) / 4;

  uint32_t words[kWords];

  __device__ void load(const T* from) {
    if constexpr (kBytes == 2) {
      words[0] = *reinterpret_cast<const uint16_t*>(from);
    } else {
      const auto all = *reinterpret_cast<const AlignedArray<uint32_t, kWords>*>(from);
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = all.at[i];
    }
  }
  __device__ void store(T* to) const {
    if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(words[0]);
    } else {
      AlignedArray<uint32_t, kWords> all;
#pragma unroll
      for (int i = 0; i < kWords; ++i) all.at[i] = words[i];
      *reinterpret_cast<AlignedArray<uint32_t, kWords>*>(to) = all;
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
        const float2 pair = unpack_pair<T>(words[i / 2]);
        pack.at[i] = i % 2 == 0 ? pair.x : pair.y;
      }
    }
    return pack;
  }
};

// The rows of a run in one array.
template <typename T>
struct RowStream {
  const T* first;
  int64_t stride;
};

// Reads the rows of `Arrays` arrays in tiles of kTileRows rows each. The next tile is loaded to registers in
// advance.
template <typename T, int N, int Arrays>
class RegisterReader {
 public:
  static constexpr int kTileRows = 4;
  static constexpr int kBytes = 0;  // of shared memory
  using RowTile = RawPack<T, N>[Arrays][kTileRows];

  // The rows after the first `count` are zero.
  __device__ RegisterReader(const RowStream<T> (&rows)[Arrays], int count) {
#pragma unroll
    for (int a = 0; a < Arrays; ++a) rows_[a] = rows[a];
    fetch(count);
  }

  // left: the number of rows left, including this tile.
  __device__ void next(RowTile& tile, int left) {
#pragma unroll
    for (int a = 0; a < Arrays; ++a) {
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) tile[a][i] = next_[a][i];
    }
    fetch(left - kTileRows);
  }

 private:
  RowStream<T> rows_[Arrays];
  RowTile next_;

  __device__ void fetch(int left) {
#pragma unroll
    for (int a = 0; a < Arrays; ++a) {
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) {
        next_[a][i].clear();
        if (i < left) next_[a][i].load(rows_[a].first + i * rows_[a].stride);
      }
      rows_[a].first += kTileRows * rows_[a].stride;
    }
  }
};

template <typename Element, int Width, int Channels>
struct Instance {
  using T = Element;
  static constexpr int W = Width;
  static constexpr int N = Channels;
};

// Channels of a thread: accesses of 8 or 16 bytes.
constexpr int kPack = 4;

template <typename T, int N, typename Launch>
cudaError_t dispatch_taps(int width, const Launch& launch) {
  if (width < 1) return cudaErrorInvalidValue;
  return dispatch_width<1, 2, 3, kShortConvMaxWidth>(
      width, [&](auto taps) { return launch(Instance<T, taps(), N>{}); });
}

// Calls launch(Instance) for the type, the width and the channels of a thread. use_packs: packs fit every
// tensor.
template <typename Launch>
cudaError_t dispatch_instance(const ShortConvShape& shape, bool use_packs, const Launch& launch) {
  return dispatch_dtype(shape.dtype, [&](auto element) {
    using T = decltype(element);
    return use_packs ? dispatch_taps<T, kPack>(shape.width, launch)
                     : dispatch_taps<T, 1>(shape.width, launch);
  });
}

template <typename... Arrays>
bool are_pack_aligned(const ShortConvShape& shape, const Arrays&... arrays) {
  return shape.channels % kPack == 0 && (is_pack_aligned(arrays, kPack, dtype_size(shape.dtype)) && ...);
}

}  // namespace girih::kernels::short_conv

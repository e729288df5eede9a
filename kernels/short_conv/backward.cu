// The gradients of the convolution, with z recomputed from x:
//
//     dz_t = dy_t act'(z_t)
//     dx_s = sum_j weight_j dz_{s + (W-1) - j} + dfinal_state_{s - (end - (W-1))}      dz_t = 0 for t >= end
//     dweight_j = sum_t dz_t x_{t - (W-1) + j}        dbias = sum_t dz_t
//
// dstate is dx at the W - 1 positions before the start of the sequence.
//
// A thread has N channels and a run of tokens. The thread also reads the W - 1 tokens after its run, whose dz
// contribute to dx of the run. A block sums dweight and dbias over its runs in a fixed order and writes one
// partial, and a second kernel sums the partials in a fixed order.
#include "short_conv/window.h"
#include "tile/launch.h"

namespace girih::kernels {
namespace short_conv {
namespace {

constexpr int kBlocksPerMultiprocessor = 2;  // with 128 registers for each thread

// The same as RegisterReader for packs of 8 or 16 bytes, with a ring in shared memory that holds several
// tiles. Every thread has its own places in the ring, so threads do not wait for each other. Loads in flight
// use no registers, which the weights and sums need. (4 x 4096 tokens of 2048 channels in fp32, width 4:
// 118.0 us; with the next tile in registers, which spill, 232.6 us.)
template <typename T, int N, int Arrays>
class RingReader {
  static constexpr int kPackBytes = RawPack<T, N>::kBytes, kRow = kThreads * kPackBytes;
  static_assert(kPackBytes == 8 || kPackBytes == 16);
  static constexpr int kStages = 64 / kPackBytes;  // tiles; two blocks of x and dy use 64 KB

 public:
  static constexpr int kTileRows = 2;  // rows of a tile; 4 spill up to 188 bytes
  static constexpr int kBytes = kStages * Arrays * kTileRows * kRow;
  using RowTile = RawPack<T, N>[Arrays][kTileRows];

  __device__ RingReader(const RowStream<T> (&rows)[Arrays], int count) {
    GIRIH_DYNAMIC_SHARED(unsigned char, shared, 16);
    own_ = shared + (threadIdx.y * kLanes + threadIdx.x) * kPackBytes;
#pragma unroll
    for (int a = 0; a < Arrays; ++a) rows_[a] = rows[a];
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) fetch(count - i * kTileRows);
  }
  // Waits for the copies past the end before the shared memory is reused.
  __device__ ~RingReader() { wait_copies<0>(); }

  __device__ void next(RowTile& tile, int left) {
    wait_copies<kStages - 2>();
    fetch(left - (kStages - 1) * kTileRows);
    // The oldest tile is at the place that fetch() uses next.
#pragma unroll
    for (int a = 0; a < Arrays; ++a) {
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) {
        tile[a][i].load(reinterpret_cast<const T*>(own_ + offset_ + (a * kTileRows + i) * kRow));
      }
    }
  }

 private:
  RowStream<T> rows_[Arrays];
  int offset_ = 0;
  unsigned char* own_;

  __device__ void fetch(int left) {
#pragma unroll
    for (int a = 0; a < Arrays; ++a) {
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) {
        const uint32_t to = shared_address(own_ + offset_ + (a * kTileRows + i) * kRow);
        const T* from = rows_[a].first + i * rows_[a].stride;
        if constexpr (kPackBytes == 16) {
          copy_async(to, from, i < left);
        } else {
          copy_async_8(to, from, i < left);
        }
      }
      rows_[a].first += kTileRows * rows_[a].stride;
    }
    commit_copies();
    offset_ += kBytes / kStages;
    if (offset_ == kBytes) offset_ = 0;
  }
};

// The reader of x and dy. With one channel for each thread there are enough registers for RegisterReader.
template <typename T, int N>
using Reader = std::conditional_t<N == 1, RegisterReader<T, N, 2>, RingReader<T, N, 2>>;

// The sums of dweight of a thread, followed by dbias.
template <int W, int N>
using WeightSums = Pack<N>[W + 1];

// The ring of x and dy, later the sums of the block.
template <typename T, int W, int N>
constexpr int kSharedBytes = std::max(Reader<T, N>::kBytes, int(sizeof(WeightSums<W, N>)) * kThreads);

// Computes dx of the `count` tokens from `first` that one sequence has in a run, and adds to dweight and
// dbias.
template <typename T, int W, int N>
__device__ void run_backward(const ShortConvBackward& p, const Filter<T, W, N>& filter,
                             const Sequence& sequence, int64_t first, int count, int64_t channel,
                             WeightSums<W, N>& parts) {
  // Tokens up to the end of the sequence, at most those that contribute to dx of the run.
  const auto to_end = static_cast<int>(min(sequence.end - first, int64_t{count} + W - 1));
  const int end = p.dy.data == nullptr ? 0 : to_end;
  constexpr int kTileRows = Reader<T, N>::kTileRows;
  Reader<T, N> rows({{&at<T>(p.x, sequence.batch, first, channel), p.x.stride[1]},
                     {&at<T>(p.dy, sequence.batch, first, channel), p.dy.stride[1]}},
                    end);
  const int64_t dx_stride = p.dx.stride[1];
  T* to = &at<T>(p.dx, sequence.batch, first, channel) - (W - 1) * dx_stride;
  Pack<N> window[W - 1 + kTileRows], dx[W - 1 + kTileRows];  // tokens t - (W-1), ...
#pragma unroll
  for (int j = 0; j + 1 < W; ++j) {
    window[j] = input_at<T, W, N>(p.x, p.state, sequence, first - (W - 1) + j, channel);
    dx[j] = zeros<N>();
  }
  // is_full: all tokens of the tile are in the run.
  const auto tile = [&](int t, auto all) {
    constexpr bool is_full = decltype(all)::value;
    typename Reader<T, N>::RowTile raw;
    rows.next(raw, end - t);
    Pack<N> z[kTileRows], dz[kTileRows];
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      window[W - 1 + i] = raw[0][i].pack();
      dx[W - 1 + i] = zeros<N>();
      dz[i] = raw[1][i].pack();
    }

    // dz_t = dy_t act'(z_t)
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) z[i] = filter.apply(window + i);
    filter.differentiate(dz, z);
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const bool own = is_full || t + i < count;
#pragma unroll
      for (int c = 0; c < N; ++c) {
        const float own_dz = own ? dz[i].at[c] : 0.f;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          dx[i + j].at[c] += filter.weight[j].at[c] * dz[i].at[c];
          parts[j].at[c] += own_dz * window[i + j].at[c];
        }
        parts[W].at[c] += own_dz;
      }
    }

    // Stores the dx that no later tile contributes to. In a full tile none of them are among the last W - 1
    // tokens of the sequence.
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const int finished = t - (W - 1) + i;
      if ((i < W - 1 && finished < 0) || (!is_full && finished >= count)) continue;
      const int row = finished - (to_end - (W - 1));
      if (!is_full && row >= 0 && p.dfinal_state.data != nullptr) {
        const Pack<N> dstate_row = load<N>(&at<T>(p.dfinal_state, sequence.index, row, channel));
#pragma unroll
        for (int c = 0; c < N; ++c) dx[i].at[c] += dstate_row.at[c];
      }
      store(to + i * dx_stride, dx[i]);
    }
    to += kTileRows * dx_stride;
#pragma unroll
    for (int j = 0; j + 1 < W; ++j) {
      window[j] = window[kTileRows + j];
      dx[j] = dx[kTileRows + j];
    }
  };
  int t = 0;
#pragma unroll 1
  for (; t + kTileRows <= count; t += kTileRows) tile(t, std::true_type());
#pragma unroll 1
  for (; t < count + W - 1; t += kTileRows) tile(t, std::false_type());
}

template <typename T, int W, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward(const ShortConvBackward p, float* const partials, const int run_length) {
  const ThreadWork<N> job(p.shape, blockIdx.x, run_length);
  job.template prefetch_first<T>(p.x);
  if (p.dy.data != nullptr) job.template prefetch_first<T>(p.dy);
  const Filter<T, W, N> filter(p.weight, p.bias, job.first_channel, p.shape.channels, p.shape.silu);
  WeightSums<W, N> parts = {};
  job.for_each_sequence(p.shape.tokens, [&](const Sequence& sequence, int64_t first, int64_t last) {
    if (sequence.is_owned) {
      run_backward<T, W, N>(p, filter, sequence, first, static_cast<int>(last - first), job.channel, parts);
    } else {
      for (int64_t t = first; t < last; ++t) store(&at<T>(p.dx, job.batch, t, job.channel), zeros<N>());
    }
  });

  // partials [groups, W + 1, channels]: the taps, then the bias
  constexpr int kColumns = kLanes * N;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 16);
  const auto buffer = reinterpret_cast<float(*)[W + 1][kColumns]>(shared);  // [kRuns]
  __syncthreads();  // all threads have finished with their rings
#pragma unroll
  for (int j = 0; j <= W; ++j) store(&buffer[threadIdx.y][j][threadIdx.x * N], parts[j]);
  __syncthreads();  // the sums of all threads are stored
  for (int i = threadIdx.y * kLanes + threadIdx.x; i < (W + 1) * kColumns; i += kThreads) {
    const int j = i / kColumns, column = i % kColumns;
    float sum = 0.f;
#pragma unroll
    for (int y = 0; y < kRuns; ++y) sum += buffer[y][j][column];
    const int64_t channel = job.first_channel + column;
    if (channel < p.shape.channels) {
      partials[(int64_t{job.group} * (W + 1) + j) * p.shape.channels + channel] = sum;
    }
  }
}

// Sums the partials in a fixed order: a thread adds every eighth group, then the sums of eight threads are
// added.
__global__ void __launch_bounds__(kThreads)
    sum_partials(const ShortConvBackward p, const float* const partials, const int64_t count) {
  __shared__ float parts[kRuns][kLanes];
  const int64_t channels = p.shape.channels;
  const int64_t columns = (p.shape.width + 1) * channels;
  for (int64_t block = blockIdx.x; block * kLanes < columns; block += gridDim.x) {
    const int64_t column = block * kLanes + threadIdx.x;
    float sum = 0.f;
    if (column < columns) {
      for (int64_t group = threadIdx.y; group < count; group += kRuns)
        sum += partials[group * columns + column];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();  // the parts of all threads are stored
    if (threadIdx.y == 0 && column < columns) {
      float total = 0.f;
#pragma unroll
      for (int y = 0; y < kRuns; ++y) total += parts[y][threadIdx.x];
      const int64_t tap = column / channels, channel = column % channels;
      if (tap < p.shape.width) {
        store_element(p.dweight, total, channel, tap);
      } else if (p.dbias.data != nullptr) {
        store_element(p.dbias, total, channel);
      }
    }
    __syncthreads();  // parts has been read
  }
}

// dstate. Row r of the state is the input at position start - (W-1) + r: token start + r - j reads it with
// tap j <= r. A sequence of fewer than W - 1 tokens also copies rows of the state to its final state.
template <typename T, int W>
__global__ void __launch_bounds__(kThreads) state_backward(const ShortConvBackward p) {
  const int64_t channels = p.shape.channels;
  const int64_t jobs = p.shape.tokens.sequences * (W - 1) * channels;
  const int64_t grid = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t job = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; job < jobs; job += grid) {
    const int64_t channel = job % channels;
    const int row = static_cast<int>(job / channels % (W - 1));
    const Sequence sequence = sequence_at(p.shape.tokens, job / channels / (W - 1));
    const Filter<T, W, 1> filter(RawFilter<W, 1>(p.weight, p.bias, channel), p.weight.dtype, p.bias.dtype,
                                 p.shape.silu);
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
      Pack<1> z[1] = {filter.apply(window)}, dz[1] = {load<1>(&at<T>(p.dy, sequence.batch, t, channel))};
      filter.differentiate(dz, z);
      dstate.at[0] += filter.weight[j].at[0] * dz[0].at[0];
    }
    const int64_t final_row = row - (sequence.end - sequence.start);
    if (final_row >= 0 && p.dfinal_state.data != nullptr) {
      dstate.at[0] += load<1>(&at<T>(p.dfinal_state, sequence.index, final_row, channel)).at[0];
    }
    store(&at<T>(p.dstate, sequence.index, row, channel), dstate);
  }
}

}  // namespace
}  // namespace short_conv

cudaError_t short_conv_backward(const ShortConvBackward& p, Workspace& workspace, cudaStream_t stream) {
  using namespace short_conv;
  const SequenceLayout& layout = p.shape.tokens;
  if (p.shape.channels == 0) return cudaSuccess;
  const dim3 threads(kLanes, kRuns);
  const bool use_packs = are_pack_aligned(p.shape, p.dy, p.dfinal_state, p.x, p.state, p.dx);
  return dispatch_instance(p.shape, use_packs, [&](auto instance) {
    using I = decltype(instance);
    using T = typename I::T;
    const int length = run_length(p.shape, I::N, kBlocksPerMultiprocessor);
    const int64_t groups = run_group_count(layout, length), columns = (I::W + 1) * p.shape.channels;
    const int64_t blocks = divide_up(p.shape.channels, kLanes * I::N) * groups;
    if (blocks > 0x7fffffff / kRuns) return cudaErrorInvalidConfiguration;
    auto* const partials = workspace.array<float>(groups * columns);
    if (blocks > 0) {
      constexpr auto kernel = backward<T, I::W, I::N>;
      constexpr int bytes = kSharedBytes<T, I::W, I::N>;
      GIRIH_TRY(allow_shared<kernel>(bytes));
      GIRIH_TRY(launch_grid<kernel>(blocks, threads, bytes, stream, p, partials, length));
    }
    GIRIH_TRY(launch_grid<sum_partials>(clamp_grid_blocks(divide_up(columns, kLanes)), threads, 0, stream, p,
                                        partials, groups));
    if constexpr (I::W > 1) {
      const int64_t rows = layout.sequences * (I::W - 1) * p.shape.channels;
      if (rows > 0 && p.dstate.data != nullptr) {
        return launch_grid<state_backward<T, I::W>>(clamp_grid_blocks(divide_up(rows, kThreads)), kThreads, 0,
                                                    stream, p);
      }
    }
    return cudaSuccess;
  });
}

}  // namespace girih::kernels

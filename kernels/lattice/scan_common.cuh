// Building blocks of the scans. A warp has 16 vectors of the memory as rows; producer warps load the tokens
// of the chunks into a ring.
#pragma once

#include "lattice/intra_chunk.cuh"
#include "lattice/launch.h"
#include "pipe/device.h"
#include "pipe/ring.h"
#include "pipe/row_source.h"
#include "tile/shared.h"

namespace girih::kernels::lattice {

// Stages of the ring; a stage has one chunk. There are up to four producer warps, which take the chunks
// round-robin, so that several loads are in flight.
constexpr int stages_of(int R) { return R == 16 ? 8 : R == 32 ? 4 : 2; }

// Stores the weights sign gamma_t e^{L_C - L_t} of R tokens, then m_C, e^{L_C} of this call's tokens, and L_C
// of the whole chunk in units of log2. Called by one warp. `before`: earlier_log_decay() of a resumed chunk.
template <int R>
__device__ inline void store_weights(float* to, const LaneTokens<R>& tokens, float sign, float before) {
  const float sum = tokens.all();
#pragma unroll
  for (int i = 0; i < tokens.kTokensPerLane; ++i) {
    const int t = tokens.first() + i;
    if (t < R) to[t] = sign * tokens.gamma[i] * exp2_fast(sum - tokens.sum[i]);
  }
  if (lane() == 0) {
    const float all = before + sum;
    to[R] = exp2_fast(fmaxf(all, kMinLogDecay));
    to[R + 1] = exp2_fast(sum);
    to[R + 2] = all;
  }
}
template <int R, class Problem>
__device__ inline void store_weights(float* to, const RawTokens<R>& raw, const Problem& p,
                                     const ChunkCoord& coord) {
  store_weights(to, sum_tokens(raw, p.gamma.dtype, p.g.dtype), sign_of(p.shape.objective),
                earlier_log_decay(p.start, coord));
}

// A stage is full when its producer warp's copies have arrived, and empty when all `warps` have released it.
template <int Stages>
struct LoadBarriers {
  FullBarriers<Stages> full;
  EmptyBarriers<Stages> empty;

  __device__ void init(int warps) {
    full.init(32 + arrival_count(1));
    empty.init(arrival_count(warps));
    __syncthreads();
  }
};

template <class S>
struct Ring {
  using T = typename S::T;
  static constexpr int kStages = stages_of(S::R), kProducerWarps = kStages < 4 ? kStages : 4;
  static constexpr int kThreads = S::kThreads + 32 * kProducerWarps;
  static constexpr int kFloats = S::R + 4;
  static constexpr int kStageBytes = S::Keys::kBytes + S::Values::kBytes;
  static constexpr int kBytes = kStages * (kStageBytes + 4 * kFloats + 16);
  static_assert(kStages % kProducerWarps == 0,
                "a stage has one producer warp: a barrier has only one bit of phase");

  unsigned char* base;

  __device__ typename S::Keys k(int stage) const {
    return {reinterpret_cast<T*>(base + stage * kStageBytes)};
  }
  __device__ typename S::Values v(int stage) const {
    return {reinterpret_cast<T*>(base + stage * kStageBytes + S::Keys::kBytes)};
  }
  __device__ float* weights(int stage) const {
    return reinterpret_cast<float*>(base + kStages * kStageBytes) + stage * kFloats;
  }
  __device__ float memory_decay(int stage) const { return weights(stage)[S::R]; }
  __device__ float call_decay(int stage) const { return weights(stage)[S::R + 1]; }
  __device__ float sum(int stage) const { return weights(stage)[S::R + 2]; }
  __device__ LoadBarriers<kStages>& barriers() const {
    return *reinterpret_cast<LoadBarriers<kStages>*>(base + kStages * (kStageBytes + 4 * kFloats));
  }

  // Loads the chunks of a sequence in order; called by a producer warp.
  __device__ void load(const LatticeScan& p, const ChunkedSequence& of, int head, int producer) const {
    PipelineState pipe;
    pipe.skip(producer, kStages);
#pragma unroll 1
    for (int64_t chunk_index = producer; chunk_index < of.chunks;
         chunk_index += kProducerWarps, pipe.skip(kProducerWarps, kStages)) {
      const ChunkCoord coord = chunk_coord(p.shape, of, chunk_index, head);
      const auto raw = load_tokens<S::R>(p.gamma, p.g, coord);
      const int stage = pipe.stage;
      barriers().empty.wait(pipe);
      load_by_warp(k(stage), row_of<T>(p.k, coord.batch(), coord.chunk.start, head), p.k.stride[1],
                   coord.chunk.length, p.shape.M);
      load_by_warp(v(stage), row_of<T>(p.v, coord.batch(), coord.chunk.start, head), p.v.stride[1],
                   coord.chunk.length, p.shape.D);
      store_weights(weights(stage), raw, p, coord);
      barriers().full.arrive_after_copies(stage);
      barriers().full.arrive_warp(stage);
    }
  }
};

// Calls f(element, the same element of a state [N, H, D, M] in fp32, row 0 or 1 of the lane) for the existing
// elements of a warp's 16 vectors from `first` on. Runs once or twice a sequence, so it is a loop that
// rotates the registers of 8 columns at a time: unrolled, it needs more registers than the rest of the
// kernel.
template <int N, class Array, class F>
__device__ inline void for_each_element(Accumulator<N>& X, const Array& array, int64_t sequence, int head,
                                        const LatticeShape& shape, int first, const F& f) {
  using Element = std::conditional_t<std::is_same_v<Array, InputTensor<4>>, const float, float>;
  const int m = first + lane_row();
  Element* element = static_cast<Element*>(array.data) + offset_of(array, sequence, head, lane_col(), m);
  const int64_t row_stride = 8 * array.stride[3];
#pragma unroll 1
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int d = 8 * n + lane_col() + (i & 1);
      if (m + (i >> 1) * 8 < shape.M && d < shape.D) {
        f(X.at[0][i], element[(i & 1) * array.stride[2] + (i >> 1) * row_stride], i >> 1);
      }
    }
    element += 8 * array.stride[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first_block = X.at[0][i];
#pragma unroll
      for (int j = 0; j + 1 < N; ++j) X.at[j][i] = X.at[j + 1][i];
      X.at[N - 1][i] = first_block;
    }
  }
}
template <int N>
__device__ inline void load_vectors(Accumulator<N>& X, const InputTensor<4>& from, int64_t sequence, int head,
                                    const LatticeShape& shape, int first) {
  fill(X, 0.f);
  if (from.data == nullptr) return;
  for_each_element(X, from, sequence, head, shape, first, [](float& x, const float& at, int) { x = at; });
}
template <int N>
__device__ inline void store_vectors(const OutputTensor<4>& to, Accumulator<N>& X, int64_t sequence, int head,
                                     const LatticeShape& shape, int first) {
  for_each_element(X, to, sequence, head, shape, first, [](float& x, float& at, int) { at = x; });
}

// x.y of both rows of the lane.
template <int N>
__device__ inline float2 row_dots(const Accumulator<N>& x, const Accumulator<N>& y) {
  // Four accumulators shorten the chain of dependent sums.
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
  for_each_register<N>([&](int n, int i) { sum[i] = fmaf(x.at[n][i], y.at[n][i], sum[i]); });
  return {sum_over_row(sum[0] + sum[1]), sum_over_row(sum[2] + sum[3])};
}

// Stores 16 whole rows of a tile, from row `first` on, to dtype [M, D] at `to`; by a warp.
template <typename T, class Tile>
__device__ inline void store_tile_rows(T* to, const Tile& tile, int first, const LatticeShape& shape) {
  constexpr int kPacks = Tile::kCols / 8, kStep = 32 / kPacks;
  const int row = first + lane() / kPacks, col = lane() % kPacks * 8;
  T* element = to + row * shape.D + col;
#pragma unroll
  for (int i = 0; i < 16; i += kStep) {
    if (row + i < shape.M && col < shape.D) {
      *reinterpret_cast<uint4*>(element) = *reinterpret_cast<const uint4*>(&tile.at(row + i, col));
    }
    element += kStep * shape.D;
  }
}

// Offset of a chunk's memory in [chunk_count, H, M, D].
__device__ inline int64_t memory_offset(const LatticeShape& shape, int64_t number, int head) {
  return (number * shape.heads + head) * static_cast<int64_t>(shape.M) * shape.D;
}

// Sequence and head of a block of a scan; `share` is its index among the blocks with the same sequence and
// head.
struct SequenceCoord {
  ChunkedSequence of;
  int head, share;
};
__device__ inline SequenceCoord sequence_coord(const LatticeShape& shape, unsigned shares = 1) {
  const auto heads = static_cast<unsigned>(shape.heads);
  const unsigned number = blockIdx.x / shares;
  return {chunked_sequence(shape.grid, number / heads), static_cast<int>(number % heads),
          static_cast<int>(blockIdx.x % shares)};
}

// Whether chunk n belongs to the share; `shares` is 1 or 2.
__device__ inline bool belongs_to_share(int64_t n, int share, int shares) {
  return ((n ^ share) & (shares - 1)) == 0;
}

template <class S>
struct ScanStorage {
  static constexpr int kBytes = S::Memory::kBytes + Ring<S>::kBytes;
};

// Number of blocks for a sequence and head: `most` if multiprocessors would be idle otherwise, else 1.
inline cudaError_t choose_shares(const LatticeShape& shape, int most, int& shares) {
  int processors = 0;
  if (const cudaError_t error = processor_count(processors); error != cudaSuccess) return error;
  shares = most * shape.grid.tokens.sequences * shape.heads <= processors ? most : 1;
  return cudaSuccess;
}

// Launches `shares` blocks for every sequence and head.
template <auto Kernel, class Problem>
cudaError_t launch_sequences(const Problem& p, int threads, int bytes, const LatticeShape& shape,
                             cudaStream_t stream, int shares = 1) {
  const int64_t blocks = shape.grid.tokens.sequences * shape.heads * shares;
  return launch_kernel<Kernel>(p, blocks, threads, bytes, stream);
}

}  // namespace girih::kernels::lattice

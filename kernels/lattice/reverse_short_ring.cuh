// The ring of reverse_short.cuh: inputs of a chunk, and the results of the state warps.
#pragma once

#include "lattice/scan_common.cuh"
#include "pipe/ring.h"
#include "pipe/roles.h"

namespace girih::kernels::lattice {

// Parameters of the kernel. `shares`: blocks with the same sequence and head.
struct ShortReverseArguments {
  LatticeReverse reverse;
  LatticeDkv dkv;
  int shares;
};

template <typename T_>
struct ShortReverseRing {
  using T = T_;
  using S = Sizes<T, 16, 64, 64>;
  static constexpr int kStages = 8, kProducerWarps = 4, kDkvWarps = 4, kMostShares = 2;
  static constexpr int kThreads = S::kThreads + 32 * (kProducerWarps + kDkvWarps);
  // Every stage has one producer warp, and always belongs to the same share.
  static_assert(kStages % kProducerWarps == 0 && kStages % kMostShares == 0);
  // Dkv warps that take chunks round-robin. They are at most one lap of the ring apart, because a barrier has
  // only one bit of phase.
  __device__ static int dkv_warps(int shares) { return min(kDkvWarps, kStages / shares); }

  struct StageScalars {
    float alpha[64], rho[64];
    float weights[16], step[16], to_end[16];  // sign gamma e^{L_C - L_t}, sign gamma, e^{L_C - L_t}
    float memory_decay, call_decay, sum,
        unused;  // m_C, e^{L_C} of this call's tokens, L_C of the whole chunk
    // dkv.cuh: the cancelling sum at the end, and whether the vector is mostly steps
    float cancelling_sum[64], steps[64];
  };
  static constexpr int kSources = 6;  // S, its gradient, k, v, dk, dv
  static constexpr int kTokenBytes = S::Keys::kBytes;
  static constexpr int kStageBytes = 2 * S::Memory::kBytes + 4 * kTokenBytes;
  static constexpr int kScalarBytes = sizeof(StageScalars);
  static constexpr int kBytes = kStages * (kStageBytes + kScalarBytes + 3 * 8) + S::Values::kBytes +
                                kDkvWarps * kTokenBytes + 2 * S::kWarps * static_cast<int>(sizeof(float)) +
                                static_cast<int>(sizeof(SequenceCoord)) +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  enum TokenTile { k, v, dk, dv };

  unsigned char* base;

  template <class Tile>
  __device__ Tile tile(int stage, int offset) const {
    return {reinterpret_cast<T*>(base + stage * kStageBytes + offset)};
  }
  __device__ auto memory(int stage) const { return tile<typename S::Memory>(stage, 0); }
  __device__ auto gradient(int stage) const { return tile<typename S::Memory>(stage, S::Memory::kBytes); }
  __device__ auto tokens(int stage, TokenTile which) const {
    return tile<typename S::Keys>(stage, 2 * S::Memory::kBytes + which * kTokenBytes);
  }
  __device__ auto y_tile() const { return tile<typename S::Values>(kStages, 0); }
  // A tile for each dkv warp.
  __device__ auto rounded(int dkv_warp) const {
    return tile<typename S::Keys>(kStages, S::Values::kBytes + dkv_warp * kTokenBytes);
  }
  __device__ unsigned char* after_tiles() const {
    return base + kStages * kStageBytes + S::Values::kBytes + kDkvWarps * kTokenBytes;
  }
  __device__ StageScalars& scalars(int stage) const {
    return reinterpret_cast<StageScalars*>(after_tiles())[stage];
  }
  struct Barriers {
    FullBarriers<kStages> full;
    EmptyBarriers<kStages> empty;
    FullBarriers<kStages> dx_full;  // the state warps have stored dX
  };
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(after_tiles() + kStages * kScalarBytes);
  }
  // For each state warp Delta'.dDelta', and m_C c of a resumed chunk.
  __device__ float* sums() const { return reinterpret_cast<float*>(&barriers() + 1); }

  // Sequence and head of the block, in shared memory to save registers.
  __device__ SequenceCoord& block() const {
    return *reinterpret_cast<SequenceCoord*>(sums() + 2 * S::kWarps);
  }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(&block() + 1); }

  __device__ void init(const ShortReverseArguments& p) const {
    if (threadIdx.x == 0) {
      block() = sequence_coord(p.reverse.shape, static_cast<unsigned>(p.shares));
      list_sources(p);
    }
    barriers().full.init(32 + arrival_count(1));
    barriers().empty.init(arrival_count(1));
    barriers().dx_full.init(arrival_count(S::kWarps));
    __syncthreads();
  }

  // Loads the chunks of a sequence from the last to the first; called by a producer warp. A chunk of another
  // share is needed by the state warps only.
  __device__ void load(const ShortReverseArguments& p, int producer) const {
    const ChunkedSequence& of = block().of;
    const int head = block().head;
    const LatticeReverse& from = p.reverse;
    const LatticeShape& shape = from.shape;
    const auto coord_of = [&](int64_t n) { return chunk_coord(shape, of, of.chunks - 1 - n, head); };
    if (producer >= of.chunks) return;
    auto next = load_tokens<16>(from.gamma, from.g, coord_of(producer));
    PipelineState pipe;
    pipe.skip(producer, kStages);
#pragma unroll 1
    for (int64_t n = producer; n < of.chunks; n += kProducerWarps, pipe.skip(kProducerWarps, kStages)) {
      const ChunkCoord coord = coord_of(n);
      const auto raw = next;
      if (n + kProducerWarps < of.chunks)
        next = load_tokens<16>(from.gamma, from.g, coord_of(n + kProducerWarps));
      const int stage = pipe.stage;
      const auto gates = sum_tokens(raw, from.gamma.dtype, from.g.dtype);
      const float before = earlier_log_decay(from.start, coord);
      const bool own = belongs_to_share(n, block().share, p.shares);
      // Only the state warps read a chunk of another share: their dX of the previous pass releases the stage.
      own ? barriers().empty.wait(pipe) : barriers().dx_full.wait_for_previous(pipe);
      load_tiles(stage, own ? kSources : kSources - 2, shape, coord);
      StageScalars& to = scalars(stage);
      const float* const ends = from.ends + (coord.number * shape.heads + head) * 2 * shape.M;
      const int m = lane() % 16 * 4;
      copy_async(shared_address(lane() < 16 ? &to.alpha[m] : &to.rho[m]),
                 ends + (lane() < 16 ? 0 : shape.M) + m, m < shape.M);
      store_scalars(to, gates, sign_of(shape.objective), before);
      barriers().full.arrive_after_copies(stage);
      barriers().full.arrive_warp(stage);
    }
  }

 private:
  __device__ void list_sources(const ShortReverseArguments& p) const {
    const LatticeReverse& from = p.reverse;
    const LatticeShape& shape = from.shape;
    const int head = block().head;
    RowSource<T>* const to = sources();
    const auto memories = [&](const void* x) {
      return RowSource<T>{static_cast<const T*>(x) + memory_offset(shape, 0, head), shape.D, shape.D, 0};
    };
    const auto rows = [&](const auto& x, int cols, TokenTile which) {
      return row_source<T>(x, block().of.sequence.batch, head, cols, which);
    };
    to[0] = memories(from.memories), to[1] = memories(from.gradients);
    to[2] = rows(from.k, shape.M, k), to[3] = rows(from.v, shape.D, v);
    to[4] = rows(p.dkv.dk, shape.M, dk), to[5] = rows(p.dkv.dv, shape.D, dv);
  }
  // Starts the copies of the first `count` sources. A memory that fills its tile is one copy, with offsets
  // known at compile time.
  __device__ void load_tiles(int stage, int count, const LatticeShape& shape, const ChunkCoord& coord) const {
    const int64_t first = coord.number * shape.heads * shape.M;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const RowSource<T>& source = sources()[i];
      const auto to = tile<typename S::Memory>(stage, i * S::Memory::kBytes);
      if (shape.D == S::D && shape.M == S::M) {
        load_async<32>(to, source.from + first * S::D, S::D, S::M, S::D, lane());
      } else {
#pragma unroll 1
        for (int row = 0; row < S::M; row += 16) {
          source.load(typename S::Keys{to.data + row * S::D}, first + row, shape.M - row);
        }
      }
    }
#pragma unroll 1
    for (int i = 2; i < count; ++i) {
      const RowSource<T>& source = sources()[i];
      source.load(tokens(stage, static_cast<TokenTile>(source.tile)), coord.chunk.start, coord.chunk.length);
    }
  }

  __device__ void store_scalars(StageScalars& to, const LaneTokens<16>& of, float sign, float before) const {
    const float sum = of.all();
    if (lane() < 16) {
      const float step = sign * of.gamma[0], to_end = exp2_fast(sum - of.sum[0]);
      to.step[lane()] = step, to.to_end[lane()] = to_end, to.weights[lane()] = step * to_end;
    }
    if (lane() == 0) {
      const float all = before + sum;
      to.memory_decay = exp2_fast(fmaxf(all, kMinLogDecay)), to.call_decay = exp2_fast(sum), to.sum = all;
    }
  }
};

}  // namespace girih::kernels::lattice

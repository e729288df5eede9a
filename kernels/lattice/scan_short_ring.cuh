// The ring of scan_short.cuh: the tokens of a chunk, the memory before it, and H, alpha and rho from the
// state warps. HasCluster: each of the two blocks has a ring (scan_short_cluster.cuh).
#pragma once

#include "lattice/scan_common.cuh"
#include "pipe/ring.h"
#include "tile/cluster.h"

namespace girih::kernels::lattice {

// Parameters of the kernel.
struct ShortScanArguments {
  LatticeScan scan;
  LatticeRead read;
};

template <typename T_, LatticeObjective Objective_, bool HasCluster>
struct ShortScanRing {
  using T = T_;
  static constexpr LatticeObjective kObjective = Objective_;
  using S = Sizes<T, 16, 64, 64>;
  static constexpr bool kHasCluster = HasCluster;
  static constexpr int kStages = HasCluster ? 10 : 14, kOutputWarps = HasCluster ? 10 : 6, kProducerWarps = 2;
  static constexpr int kStateProducerWarps =
      HasCluster ? 5 : kProducerWarps;  // in the block of the state warps
  static constexpr int kThreads = (HasCluster ? 0 : S::kThreads) + 32 * (kOutputWarps + kProducerWarps);
  // Every stage has one producer warp. Output warps are at most one lap of the ring apart, because a barrier
  // has only one bit of phase. HasCluster: sends may overtake each other, so a stage always has the same
  // output warp.
  static_assert(kStages % kProducerWarps == 0 && kStages % kStateProducerWarps == 0);
  static_assert(HasCluster ? kStages == kOutputWarps : kStages >= kOutputWarps);

  struct StageScalars {
    ChunkTokens<16> tokens;
    float weights[20];         // store_weights()
    float alpha[64], rho[64];  // end of the chunk, from the state warps
    __device__ float memory_decay() const { return weights[16]; }
    __device__ float call_decay() const { return weights[17]; }
    __device__ float sum() const { return weights[18]; }
  };
  enum TokenTile { v, k, q };                          // H replaces v, o replaces q
  static constexpr int kSources = HasCluster ? 2 : 3;  // k, v and q; HasCluster: k and v, or k and q
  static constexpr int kTokenBytes = S::Keys::kBytes;
  static constexpr int kStageBytes = S::Memory::kBytes + 3 * kTokenBytes;
  static constexpr int kSentBytes = S::Memory::kBytes + kTokenBytes;  // memory and H
  static constexpr int kScalarBytes = sizeof(StageScalars);
  struct Barriers {
    FullBarriers<kStages> full;
    FullBarriers<kStages> state_full;  // the state warps have stored S and H
    EmptyBarriers<kStages> empty;
    EmptyBarriers<kStages> state_empty;  // HasCluster: the output warps have finished with S and H
  };
  static constexpr int kBytes = kStages * (kStageBytes + kScalarBytes) + S::Memory::kBytes + 4 * S::M +
                                static_cast<int>(sizeof(Barriers) + sizeof(SequenceCoord)) +
                                kSources * static_cast<int>(sizeof(RowSource<T>));

  unsigned char* base;

  template <class Tile>
  __device__ Tile tile(int stage, int offset) const {
    return {reinterpret_cast<T*>(base + stage * kStageBytes + offset)};
  }
  __device__ auto memory(int stage) const { return tile<typename S::Memory>(stage, 0); }  // S^T
  __device__ static constexpr int offset_of(TokenTile which) {
    return S::Memory::kBytes + which * kTokenBytes;
  }  // in a stage
  __device__ auto tokens(int stage, TokenTile which) const {
    return tile<typename S::Keys>(stage, offset_of(which));
  }
  // Delta^T and |Delta_i|^2 of a resumed chunk.
  __device__ auto step() const { return tile<typename S::Memory>(kStages, 0); }
  __device__ float* step_square() const {
    return reinterpret_cast<float*>(base + kStages * kStageBytes + S::Memory::kBytes);
  }
  __device__ StageScalars& scalars(int stage) const {
    return reinterpret_cast<StageScalars*>(step_square() + S::M)[stage];
  }
  __device__ Barriers& barriers() const { return *reinterpret_cast<Barriers*>(&scalars(kStages)); }

  // Sequence and head of the block, in shared memory to save registers.
  __device__ SequenceCoord& block() const { return *reinterpret_cast<SequenceCoord*>(&barriers() + 1); }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(&block() + 1); }

  // `reads`: this block has the output warps.
  __device__ void init(const ShortScanArguments& p, bool reads) const {
    if (threadIdx.x == 0) {
      block() = sequence_coord(p.scan.shape, HasCluster ? 2 : 1);
      list_sources(p, reads);
    }
    const bool sends = HasCluster && !reads, stores = p.scan.memories != nullptr;
    Barriers& all = barriers();
    all.full.init(32 + arrival_count(1));
    all.state_full.init(HasCluster && reads ? 1 : arrival_count(S::kWarps));
    all.empty.init(sends ? 1 + (stores ? arrival_count(1) : 0) : arrival_count(1));
    if constexpr (HasCluster) {
      all.state_empty.init(1);
      fence_barrier_init();
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // Loads the chunks of a sequence in order; called by one of `producers` warps.
  // `reads`: this block has the output warps.
  __device__ void load(const LatticeScan& p, int producer, int producers, bool reads) const {
    const LatticeShape& shape = p.shape;
    const ChunkedSequence& of = block().of;
    const int head = block().head;
    if (producer >= of.chunks) return;
    auto next = load_tokens<16>(p.gamma, p.g, chunk_coord(shape, of, producer, head));
    PipelineState pipe;
    pipe.skip(producer, kStages);
#pragma unroll 1
    for (int64_t n = producer; n < of.chunks; n += producers, pipe.skip(producers, kStages)) {
      const ChunkCoord coord = chunk_coord(shape, of, n, head);
      const auto raw = next;
      if (n + producers < of.chunks) {
        next = load_tokens<16>(p.gamma, p.g, chunk_coord(shape, of, n + producers, head));
      }
      const int stage = pipe.stage;
      barriers().empty.wait(pipe);
#pragma unroll 1
      for (int i = 0; i < kSources; ++i) {
        const RowSource<T>& source = sources()[i];
        source.load(tokens(stage, static_cast<TokenTile>(source.tile)), coord.chunk.start,
                    coord.chunk.length);
      }
      StageScalars& to = scalars(stage);
      const auto gates = sum_tokens(raw, p.gamma.dtype, p.g.dtype);
      const float sign = sign_of(kObjective), before = earlier_log_decay(p.start, coord);
      if (reads) store_tokens<T>(to.tokens, gates, sign, before);
      if (!HasCluster || !reads) store_weights(to.weights, gates, sign, before);
      barriers().full.arrive_after_copies(stage);
      barriers().full.arrive_warp(stage);
    }
  }

  // Stores what backward needs of a chunk; called by a warp.
  __device__ void store_saved(const LatticeScan& p, int64_t number, int stage) const {
    const LatticeShape& shape = p.shape;
    const int head = block().head;
    store_rows<1>(memory(stage), static_cast<T*>(p.memories) + memory_offset(shape, number, head), shape.D,
                  shape.M, shape.D, 0);
    const bool is_rho = lane() >= 16;
    const int m = lane() % 16 * 4;
    float* const to = p.ends + ((number * shape.heads + head) * 2 + (is_rho ? 1 : 0)) * shape.M + m;
    if (m < shape.M) {
      *reinterpret_cast<float4*>(to) =
          *reinterpret_cast<const float4*>((is_rho ? scalars(stage).rho : scalars(stage).alpha) + m);
    }
  }

 private:
  __device__ void list_sources(const ShortScanArguments& p, bool reads) const {
    const LatticeShape& shape = p.scan.shape;
    const int head = block().head;
    RowSource<T>* const to = sources();
    const auto rows = [&](const InputTensor<4>& x, int head, int cols, TokenTile which) {
      return row_source<T>(x, block().of.sequence.batch, head, cols, which);
    };
    to[0] = rows(p.scan.k, head, shape.M, k);
    if (!HasCluster || !reads) to[1] = rows(p.scan.v, head, shape.D, v);
    if (reads) to[kSources - 1] = rows(p.read.q, head * (shape.query_heads / shape.heads), shape.M, q);
  }
};

}  // namespace girih::kernels::lattice

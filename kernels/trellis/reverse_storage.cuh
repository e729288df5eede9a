// Shared memory of the reverse scan. A block has one sequence, head and memory.
//
// The tokens pass through a ring of stages with 16 tokens a stage, from the last tile on. Barriers of a
// stage:
//
//     full       a producer warp has loaded the tokens
//     dz_full    the state warps have stored dz and -J du
//     empty      the output warps have released the stage
//
// A second ring (memory_full, memory_empty) passes the memory before every chunk from a warp that loads
// memories to the output warps. A third ring (gradient_full, gradient_empty) passes G after every chunk from
// the state warps to the output warps.
#pragma once

#include "pipe/ring.h"
#include "pipe/roles.h"
#include "trellis/reads.cuh"

namespace girih::kernels {

template <typename T, int Width>
struct TrellisReverseStorage {
  using StageTile = SharedTile<T, kTokenTile, Width>;
  using Memory = SharedTile<T, Width, Width>;
  // Warps of each role. A chunk has at most kOutputWarps tiles; one more warp loads memories.
  static constexpr int kStateWarps = 8, kOutputWarps = kMaxChunk / kTokenTile, kProducerWarps = 3;
  static constexpr int kThreads = (kStateWarps + kOutputWarps + kProducerWarps + 1) * 32;
  static constexpr int kStages = Width == 64 ? 8 : 4, kMemoryStages = Width == 64 ? 5 : 1;
  // The state warps load the next tile before they store dz of the current one, and the stages of a chunk are
  // released after dz of its last tile: the ring has a whole chunk and the next tile.
  static constexpr bool kPrefetch = Width == 64;
  static_assert(!kPrefetch || kStages > kOutputWarps);
  // Tiles of a stage. kX, kW, kL, kU: x, w, l, u. kScaledL: e^{L_t} l_t. kIntraDu: the term of du from reads
  // in the chunk, later dx. kZ: z, later dz. kTargets: a, later -J du.
  enum StageTensor : int { kX, kW, kL, kU, kScaledL, kIntraDu, kZ, kTargets, kStageTensors };
  // Position of a tile: the last tile of a chunk, which is processed first; tile 0 of a chunk; a tile of a
  // chunk that began in an earlier call (is_resumed()); tile 0 of the sequence.
  enum TileFlag : int {
    kLastTileOfChunk = 1,
    kFirstTileOfChunk = 2,
    kResumedChunk = 4,
    kFirstTileOfSequence = 8
  };
  // Scalars of a stage: MapStats, gates and x_scale = -gamma e^{L_C - L} of each token; the decay e^{L_C};
  // the TileFlags; dL from the tile's output warp, for this tile and the later tiles of the chunk.
  struct StageScalars {
    MapStats row_stats[kTokenTile];
    TokenGate gates[kTokenTile];
    float x_scale[kTokenTile], decay;
    int tile_flags, unused[2];
    float dL[kOutputWarps][kTokenTile];
  };
  static constexpr int kSources = 6;  // x, w, l, u, z and a
  static constexpr int kTileBytes = kStages * kStageTensors * StageTile::kBytes,
                       kMemoryBytes = 2 * kMemoryStages * Memory::kBytes,
                       kScalarBytes = kStages * static_cast<int>(sizeof(StageScalars)),
                       kSumBytes = 2 * kTokenTile * kStateWarps * static_cast<int>(sizeof(float4));
  static constexpr int kBytes = kTileBytes + kMemoryBytes + kScalarBytes + kSumBytes +
                                (3 * kStages + 4 * kMemoryStages) * 8 +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  // With a weight of phi: the WeightedMapStats of each token, in 16 bytes.
  static constexpr int kWeightOffset = (kBytes + 15) / 16 * 16,
                       kWeightedBytes =
                           kWeightOffset + kStages * kTokenTile * static_cast<int>(sizeof(float4));

  unsigned char* base;

  __device__ StageTile stage_tile(int stage, StageTensor tensor) const {
    return {reinterpret_cast<T*>(base + (stage * kStageTensors + tensor) * StageTile::kBytes)};
  }
  // Ring of A before a chunk, and ring of G after it.
  __device__ Memory memory(int stage) const {
    return {reinterpret_cast<T*>(base + kTileBytes + 2 * stage * Memory::kBytes)};
  }
  __device__ Memory gradient(int stage) const {
    return {reinterpret_cast<T*>(base + kTileBytes + (2 * stage + 1) * Memory::kBytes)};
  }
  __device__ StageScalars& scalars(int stage) const {
    return reinterpret_cast<StageScalars*>(base + kTileBytes + kMemoryBytes)[stage];
  }
  __device__ float4* weighted_row_stats(int stage) const {
    return reinterpret_cast<float4*>(base + kWeightOffset) + stage * kTokenTile;
  }
  // Sums of a row for every warp, [warp][row]; two buffers alternate by tile.
  __device__ float4* partial_sums(unsigned tile_index) const {
    return reinterpret_cast<float4*>(base + kTileBytes + kMemoryBytes + kScalarBytes) +
           (tile_index & 1) * kTokenTile * kStateWarps;
  }
  struct Barriers {
    FullBarriers<kStages> full, dz_full;
    EmptyBarriers<kStages> empty;
    FullBarriers<kMemoryStages> memory_full;
    EmptyBarriers<kMemoryStages> memory_empty;
    FullBarriers<kMemoryStages> gradient_full;
    EmptyBarriers<kMemoryStages> gradient_empty;
  };
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(base + kTileBytes + kMemoryBytes + kScalarBytes + kSumBytes);
  }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(&barriers() + 1); }

  // `output_warps` warps release a stage, a memory and a gradient.
  __device__ void init_barriers(int output_warps) const {
    Barriers& all = barriers();
    all.full.init(arrival_count(1));
    all.dz_full.init(arrival_count(kStateWarps));
    all.empty.init(arrival_count(output_warps));
    all.memory_full.init(32 + arrival_count(1));
    all.memory_empty.init(arrival_count(output_warps));
    all.gradient_full.init(arrival_count(kStateWarps));
    all.gradient_empty.init(arrival_count(output_warps));
  }
  // Called by one thread.
  __device__ void init_sources(const TrellisReverse& p, const TrellisBlockCoord& coord) const {
    const int memory = coord.memory, width = p.shape.width(memory), M = p.shape.M;
    RowSource<T>* const source = sources();
    const auto source_of = [&](const InputTensor<4>& x, int cols, StageTensor tensor) {
      return row_source<T>(x, coord.chunked.sequence.batch, coord.head, cols, tensor);
    };
    source[0] = source_of(p.x[memory], width, kX), source[1] = source_of(p.w[memory], width, kW);
    source[2] = source_of(p.l[memory], M, kL), source[3] = source_of(p.u[memory], M, kU);
    source[4] = source_of(p.z[memory], M, kZ), source[5] = source_of(p.a, M, kTargets);
  }
};

__device__ inline int tiles_in(const Chunk& chunk) { return (chunk.length + kTokenTile - 1) / kTokenTile; }
__device__ inline int rows_in(const Chunk& chunk, int tile) {
  return min(chunk.length - tile * kTokenTile, kTokenTile);
}

// Whether the chunk began in an earlier call: A', from which z was computed, is not A.
__device__ inline bool is_resumed(const InputTensor<4>& chunk_start, int64_t chunk) {
  return chunk_start.data != nullptr && chunk == 0;
}

}  // namespace girih::kernels

// Shared memory of the scan. A block has one sequence, head and memory.
//
// The tokens pass through a ring of stages with 16 tokens a stage. Barriers of a stage:
//
//     full      a producer warp has loaded the tokens and computed X~, the scalars and the scores
//     u_full    the state warps have stored u and z
//     r_full    in the block of values: r of the block of keys has arrived
//     empty     the output warps have released the stage
//
// The memory before every chunk passes through a second ring of kMemoryStages stages (memory_full,
// memory_empty), from the state warps to the output warps and to the warp that stores memories.
#pragma once

#include <type_traits>

#include "pipe/ring.h"
#include "pipe/roles.h"
#include "trellis/reads.cuh"

namespace girih::kernels {

// Whether the blocks of the two memories are a cluster: r goes from the block of keys to the block of values.
// The cluster rank of a block is its MemoryIndex.
__host__ __device__ inline bool has_cluster_pair(const TrellisScan& p) {
  return p.o.data != nullptr && p.shape.memories == 2;
}

// Width: rows and columns of the tile of a memory.
template <typename T, int Width>
struct TrellisScanStorage {
  using StageTile = SharedTile<T, kTokenTile, Width>;
  using Memory = SharedTile<T, Width, Width>;
  // Warps of each role. A chunk has at most kOutputWarps tiles; one more warp stores memories.
  static constexpr int kStateWarps = Width / 16, kOutputWarps = kMaxChunk / kTokenTile, kProducerWarps = 3;
  static constexpr int kThreads = (kStateWarps + kOutputWarps + kProducerWarps + 1) * 32;
  static constexpr int kStages = Width == 64 ? 16 : 7, kMemoryStages = Width == 64 ? 5 : 2;
  // The state warps may compute a chunk ahead if a chunk has one tile (scan_lookahead_state_warps.cuh). The
  // scores x.x~ may exceed the range of fp16; bf16 has the range of fp32.
  static constexpr bool kHasLookahead = Width == 64 && std::is_same<T, __nv_bfloat16>::value;
  // No deadlock: a producer warp completes tile n after it has started the copies of tile n + kProducerWarps,
  // and the stages of a chunk are released after u of its last tile is stored. So the tiles from the first of
  // a chunk to the one kProducerWarps after its last have stages of their own.
  static_assert(kStages >= kProducerWarps + kOutputWarps);
  // Tiles of a stage. kX: x. kScaledX: x~_t = -gamma_t e^{L_C - L_t} x_t, later o. kTargets: a, later z. kQR:
  // in the block of keys q, later r; in the block of values the r of the block of keys. kU: u.
  enum StageTensor : int { kX, kScaledX, kTargets, kQR, kU, kStageTensors };
  // Position of a tile: the first tile of a chunk, the last tile of the sequence, a tile of an incomplete
  // chunk, a tile of a chunk whose A' is an argument.
  enum TileFlag : int {
    kFirstTileOfChunk = 1,
    kLastTileOfSequence = 2,
    kIncompleteChunk = 4,
    kResumedChunk = 8
  };
  // Scalars that a lane of the state warps loads for its row: the sums of a over the slots for tokens row and
  // row + 8, and the decay e^{L_C} of the chunk.
  struct alignas(16) RowScalars {
    float sum_a[2], decay, unused;
  };
  // Scalars of a stage: MapStats and gates of each token, the RowScalars, and the TileFlags.
  struct StageScalars {
    MapStats row_stats[kTokenTile];
    TokenGate gates[kTokenTile];
    RowScalars rows[kTokenTile / 2];
    int tile_flags, unused[3];
  };
  // Scores X X~^T of a stage, rounded to T, as an A fragment: X of this chunk, X~ the scaled X of the chunk
  // before (scan_lookahead_state_warps.cuh).
  using Scores = uint4[32];
  static constexpr int kSources = 3;  // x, a and q
  static constexpr int kTileBytes = kStages * kStageTensors * StageTile::kBytes,
                       kMemoryBytes = kMemoryStages * Memory::kBytes,
                       kScalarBytes = kStages * static_cast<int>(sizeof(StageScalars)),
                       kMomentBytes = 2 * kTokenTile * kStateWarps * static_cast<int>(sizeof(Moments)),
                       kScoreBytes = kHasLookahead ? kStages * static_cast<int>(sizeof(Scores)) : 0;
  static constexpr int kBytes = kTileBytes + kMemoryBytes + kScalarBytes + kMomentBytes + kScoreBytes +
                                (4 * kStages + 2 * kMemoryStages) * 8 +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  // A weight of phi needs more sums of a row, and a WeightedMapStats for each token.
  static constexpr int kWeightOffset = (kBytes + 15) / 16 * 16,
                       kWeightedBytes = kWeightOffset + kMomentBytes +
                                        kStages * kTokenTile * static_cast<int>(sizeof(WeightedMapStats));

  unsigned char* base;

  __device__ StageTile stage_tile(int stage, StageTensor tensor) const {
    return {reinterpret_cast<T*>(base + (stage * kStageTensors + tensor) * StageTile::kBytes)};
  }
  __device__ Memory memory(int stage) const {
    return {reinterpret_cast<T*>(base + kTileBytes + stage * Memory::kBytes)};
  }
  __device__ StageScalars& scalars(int stage) const {
    return reinterpret_cast<StageScalars*>(base + kTileBytes + kMemoryBytes)[stage];
  }
  // One of the four moments of a row, an element for each warp; two buffers alternate by tile. The element of
  // warp w is at index w ^ moment: four lanes store the four moments of a row to different banks.
  __device__ float* moments(unsigned tile_index, int moment, int row) const {
    return reinterpret_cast<float*>(base + kTileBytes + kMemoryBytes + kScalarBytes) +
           (((tile_index & 1) * 4 + moment) * kTokenTile + row) * kStateWarps;
  }
  // The same for the sums of compute_weighted_moments().
  __device__ float* weighted_moments(unsigned tile_index, int moment, int row) const {
    return reinterpret_cast<float*>(base + kWeightOffset) +
           (((tile_index & 1) * 4 + moment) * kTokenTile + row) * kStateWarps;
  }
  __device__ WeightedMapStats* weighted_row_stats(int stage) const {
    return reinterpret_cast<WeightedMapStats*>(base + kWeightOffset + kMomentBytes) + stage * kTokenTile;
  }
  // The calling lane's registers of the scores.
  __device__ uint4& scores(int stage) const {
    return reinterpret_cast<Scores*>(base + kTileBytes + kMemoryBytes + kScalarBytes +
                                     kMomentBytes)[stage][lane()];
  }
  struct Barriers {
    FullBarriers<kStages> full, u_full;
    EmptyBarriers<kStages> empty;
    FullBarriers<kStages> r_full;             // r of the block of keys
    FullBarriers<kMemoryStages> memory_full;  // memory before a chunk
    EmptyBarriers<kMemoryStages> memory_empty;
  };
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(base + kTileBytes + kMemoryBytes + kScalarBytes + kMomentBytes +
                                        kScoreBytes);
  }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(&barriers() + 1); }

  // `output_warps` warps release a stage and a memory. In the block of keys a stage also waits until the
  // block of values has loaded r.
  __device__ void init_barriers(const TrellisScan& p, int memory, int output_warps) const {
    Barriers& all = barriers();
    all.full.init(arrival_count(1));
    all.u_full.init(arrival_count(kStateWarps));
    all.empty.init(arrival_count(output_warps) + (has_cluster_pair(p) && memory == kKeyMemory ? 1 : 0));
    all.r_full.init(1);
    all.memory_full.init(arrival_count(kStateWarps));
    all.memory_empty.init(arrival_count(output_warps + (p.memories[memory] != nullptr ? 1 : 0)));
  }
  // Called by one thread.
  __device__ void init_sources(const TrellisScan& p, const TrellisBlockCoord& coord) const {
    const int memory = coord.memory;
    const bool has_output = p.o.data != nullptr;
    RowSource<T>* const source = sources();
    const auto source_of = [&](const InputTensor<4>& x, int cols, StageTensor tensor) {
      return row_source<T>(x, coord.chunked.sequence.batch, coord.head, cols, tensor);
    };
    source[0] = source_of(p.x[memory], p.shape.width(memory), kX);
    source[1] = source_of(p.a, p.shape.M, kTargets);
    if (memory == kKeyMemory && has_output) source[2] = source_of(p.q, p.shape.D, kQR);
  }
};

}  // namespace girih::kernels

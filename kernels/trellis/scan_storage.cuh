// Shared memory of the scan. A block has one sequence, head and memory.
//
// The tokens pass through a ring of stages with 16 tokens a stage. Barriers of a stage: `full` (producer
// warps have loaded the tokens), `written` (the state warps have stored u and z), `empty` (the output warps
// have released the stage). The memory before every chunk passes through a second ring of kMemoryStages
// stages, from the state warps to the output warps and to the warp that stores memories.
#pragma once

#include <type_traits>

#include "trellis/reads.cuh"

namespace girih::kernels {

// Whether the blocks of the two memories are a cluster: r goes from the block of keys to the block of values.
__host__ __device__ inline bool has_cluster_pair(const TrellisScan& p) {
  return p.o.data != nullptr && p.shape.memories == 2;
}

template <typename T, int Tile>
struct TrellisScanStorage {
  using Token = SharedTile<T, kTile, Tile>;
  using Memory = SharedTile<T, Tile, Tile>;
  // Warps of each role. A chunk has at most kOutputWarps tiles; one more warp stores memories.
  static constexpr int kStateWarps = Tile / 16, kOutputWarps = kMaxChunk / kTile, kProducerWarps = 3;
  static constexpr int kThreads = (kStateWarps + kOutputWarps + kProducerWarps + 1) * 32;
  static constexpr int kStages = Tile == 64 ? 16 : 7, kMemoryStages = Tile == 64 ? 5 : 2;
  // The state warps may compute a chunk ahead if a chunk has one tile (scan_short_state_warps.cuh). The
  // scores fit the range of bf16, not of fp16.
  static constexpr bool kHasLookahead = Tile == 64 && std::is_same<T, __nv_bfloat16>::value;
  // A producer warp has two tiles in flight, and up to a whole chunk of other tiles lies between these two.
  static_assert(kStages >= kProducerWarps + kOutputWarps);
  // Tiles of a stage: x; x scaled by -gamma_t e^{L_C - L_t}; a, which z replaces; in the block of keys q,
  // which r replaces, and in the block of values the r that it receives; u.
  enum TokenTile : int { kX, kScaled, kA, kQR, kU, kTokenTiles };
  // Position of a tile: it starts a chunk, it ends the sequence, its chunk is incomplete, its chunk started
  // in an earlier call.
  enum TileFlag : int { kChunkStart = 1, kSequenceEnd = 2, kIncompleteChunk = 4, kResumedChunk = 8 };
  // Sums of a over the slots for tokens r and r + 8, and the decay e^{L_C} of the chunk: the scalars of a
  // lane of the state warps.
  struct alignas(16) RowScalars {
    float sum_a[2], decay, unused;
  };
  // Scalars of a stage: Fit and gates of each token, the RowScalars, and the marks of the tile.
  struct StageScalars {
    MapStats row_stats[kTile];
    TokenGate gates[kTile];
    RowScalars rows[kTile / 2];
    int tile_flags, unused[3];
  };
  // Scores X X~^T of a stage, rounded to T, as an A fragment: X of this chunk, X~ the scaled X of the chunk
  // before (scan_short_state_warps.cuh).
  using Scores = uint4[32];
  static constexpr int kSources = 3;  // x, a and q
  static constexpr int kTileBytes = kStages * kTokenTiles * Token::kBytes,
                       kMemoryBytes = kMemoryStages * Memory::kBytes,
                       kScalarBytes = kStages * static_cast<int>(sizeof(StageScalars)),
                       kMomentBytes = 2 * kTile * kStateWarps * static_cast<int>(sizeof(Moments)),
                       kScoreBytes = kHasLookahead ? kStages * static_cast<int>(sizeof(Scores)) : 0;
  static constexpr int kBytes = kTileBytes + kMemoryBytes + kScalarBytes + kMomentBytes + kScoreBytes +
                                (4 * kStages + 2 * kMemoryStages) * 8 +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  // A weight of phi needs more sums of a row, and a WeightedMapStats for each token.
  static constexpr int kWeightOffset = (kBytes + 15) / 16 * 16,
                       kWeightedBytes = kWeightOffset + kMomentBytes +
                                        kStages * kTile * static_cast<int>(sizeof(WeightedMapStats));

  unsigned char* base;

  __device__ Token token(int stage, TokenTile which) const {
    return {reinterpret_cast<T*>(base + (stage * kTokenTiles + which) * Token::kBytes)};
  }
  __device__ Memory memory(int stage) const {
    return {reinterpret_cast<T*>(base + kTileBytes + stage * Memory::kBytes)};
  }
  __device__ StageScalars& scalars(int stage) const {
    return reinterpret_cast<StageScalars*>(base + kTileBytes + kMemoryBytes)[stage];
  }
  // A moment of a row for all warps; two buffers alternate by tile. The value of warp w is at index w ^
  // which: four lanes store the four moments of a row to different banks.
  __device__ float* moments(unsigned tiles, int which, int row) const {
    return reinterpret_cast<float*>(base + kTileBytes + kMemoryBytes + kScalarBytes) +
           (((tiles & 1) * 4 + which) * kTile + row) * kStateWarps;
  }
  // The same for the sums of compute_weighted_moments().
  __device__ float* weighted_moments(unsigned tiles, int which, int row) const {
    return reinterpret_cast<float*>(base + kWeightOffset) +
           (((tiles & 1) * 4 + which) * kTile + row) * kStateWarps;
  }
  __device__ WeightedMapStats* weighted_row_stats(int stage) const {
    return reinterpret_cast<WeightedMapStats*>(base + kWeightOffset + kMomentBytes) + stage * kTile;
  }
  __device__ uint4& scores(int stage) const {  // of the calling lane
    return reinterpret_cast<Scores*>(base + kTileBytes + kMemoryBytes + kScalarBytes +
                                     kMomentBytes)[stage][lane()];
  }
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(base + kTileBytes + kMemoryBytes + kScalarBytes + kMomentBytes +
                                       kScoreBytes);
  }
  __device__ uint64_t* u_full() const { return full() + kStages; }
  __device__ uint64_t* empty() const { return u_full() + kStages; }
  __device__ uint64_t* r_full() const { return empty() + kStages; }        // r of the block of keys
  __device__ uint64_t* memory_full() const { return r_full() + kStages; }  // memory before a chunk
  __device__ uint64_t* memory_empty() const { return memory_full() + kMemoryStages; }
  __device__ RowSource<T>* sources() const {
    return reinterpret_cast<RowSource<T>*>(memory_empty() + kMemoryStages);
  }

  // Called by one thread. `readers` warps release a tile and a memory. In the block of keys a stage also
  // waits until the block of values has loaded r.
  __device__ void init(const TrellisScan& p, const TrellisBlockCoord& coord, int output_warps) const {
    const int memory = coord.memory;
    const bool has_output = p.o.data != nullptr, stores = p.memories[memory] != nullptr;
    RowSource<T>* const source = sources();
    const auto rows = [&](const InputTensor<4>& x, int cols, TokenTile to) {
      return row_source<T>(x, coord.chunked.sequence.batch, coord.head, cols, to);
    };
    source[0] = rows(p.x[memory], p.shape.width(memory), kX), source[1] = rows(p.a, p.shape.M, kA);
    if (memory == 0 && has_output) source[2] = rows(p.q, p.shape.D, kQR);
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full() + s, arrival_count(1));
      init_barrier(u_full() + s, arrival_count(kStateWarps));
      init_barrier(empty() + s, arrival_count(output_warps) + (has_cluster_pair(p) && memory == 0 ? 1 : 0));
      init_barrier(r_full() + s, 1);
    }
    for (int stage = 0; stage < kMemoryStages; ++stage) {
      init_barrier(memory_full() + stage, arrival_count(kStateWarps));
      init_barrier(memory_empty() + stage, arrival_count(output_warps + (stores ? 1 : 0)));
    }
  }
};

}  // namespace girih::kernels

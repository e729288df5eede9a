// Shared memory of the reverse scan. A block has one sequence, head and memory.
//
// The tokens pass through a ring of stages with 16 tokens a stage, from the last tile on. Barriers of a
// stage: `full` (producer warps have loaded the tokens), `written` (the state warps have stored dz and -J
// du), `empty` (the output warps have released the stage). A second ring passes the memory before every chunk
// from a warp that loads memories to the output warps. A third ring passes G after every chunk from the state
// warps to the output warps.
#pragma once

#include "trellis/reads.cuh"

namespace girih::kernels {

template <typename T, int Tile>
struct TrellisReverseStorage {
  using Token = SharedTile<T, kTile, Tile>;
  using Memory = SharedTile<T, Tile, Tile>;
  // Warps of each role. A chunk has at most kOutputWarps tiles; one more warp loads memories.
  static constexpr int kStateWarps = 8, kOutputWarps = kMaxChunk / kTile, kProducerWarps = 3;
  static constexpr int kThreads = (kStateWarps + kOutputWarps + kProducerWarps + 1) * 32;
  static constexpr int kStages = Tile == 64 ? 8 : 4, kMemoryStages = Tile == 64 ? 5 : 1;
  // The state warps load the next tile before they store the current one: the ring holds a whole chunk and
  // that tile.
  static constexpr bool kPrefetch = Tile == 64;
  static_assert(!kPrefetch || kStages > kOutputWarps);
  // Tiles of a stage: x, w, l and u; l scaled by e^{L_t}; the terms of du from reads in the chunk; z and a,
  // which dz and -J du replace.
  enum TokenTile : int { kX, kW, kL, kU, kScaled, kIntraDu, kZ, kA, kTokenTiles };
  // Position of a tile: the last of its chunk, which is processed before the others; tile 0 of its chunk; in
  // a chunk that began in an earlier call (is_resumed); tile 0 of the sequence.
  enum TileFlag : int { kChunkEnd = 1, kChunkStart = 2, kResumedChunk = 4, kSequenceStart = 8 };
  // Scalars of a stage: Fit, gates and the factor -gamma e^{L_C - L} of each token; the decay e^{L_C}; dL
  // from the tile's output warp, for this tile and the later tiles of the chunk.
  struct StageScalars {
    MapStats row_stats[kTile];
    TokenGate gates[kTile];
    float step[kTile], decay;
    int tile_flags, unused[2];
    float dL[kOutputWarps][kTile];
  };
  static constexpr int kSources = 6;  // x, w, l, u, z and a
  static constexpr int kTileBytes = kStages * kTokenTiles * Token::kBytes,
                       kMemoryBytes = 2 * kMemoryStages * Memory::kBytes,
                       kScalarBytes = kStages * static_cast<int>(sizeof(StageScalars)),
                       kMomentBytes = 2 * kTile * kStateWarps * static_cast<int>(sizeof(float4));
  static constexpr int kBytes = kTileBytes + kMemoryBytes + kScalarBytes + kMomentBytes +
                                (3 * kStages + 4 * kMemoryStages) * 8 +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  // With a weight of phi: the WeightedMapStats of each token, in 16 bytes.
  static constexpr int kWeightOffset = (kBytes + 15) / 16 * 16,
                       kWeightedBytes = kWeightOffset + kStages * kTile * static_cast<int>(sizeof(float4));

  unsigned char* base;

  __device__ Token token(int stage, TokenTile which) const {
    return {reinterpret_cast<T*>(base + (stage * kTokenTiles + which) * Token::kBytes)};
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
    return reinterpret_cast<float4*>(base + kWeightOffset) + stage * kTile;
  }
  // Sums of a row for every warp, [warp][row]; two buffers alternate by tile.
  __device__ float4* partial_sums(unsigned tiles) const {
    return reinterpret_cast<float4*>(base + kTileBytes + kMemoryBytes + kScalarBytes) +
           (tiles & 1) * kTile * kStateWarps;
  }
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(base + kTileBytes + kMemoryBytes + kScalarBytes + kMomentBytes);
  }
  __device__ uint64_t* dz_full() const { return full() + kStages; }
  __device__ uint64_t* empty() const { return dz_full() + kStages; }
  __device__ uint64_t* memory_full() const { return empty() + kStages; }                   // memory A
  __device__ uint64_t* memory_empty() const { return memory_full() + kMemoryStages; }      // memory A
  __device__ uint64_t* gradient_full() const { return memory_empty() + kMemoryStages; }    // gradient G
  __device__ uint64_t* gradient_empty() const { return gradient_full() + kMemoryStages; }  // gradient G

  __device__ RowSource<T>* sources() const {
    return reinterpret_cast<RowSource<T>*>(gradient_empty() + kMemoryStages);
  }

  // Called by one thread. `readers` warps release a tile, a memory and a gradient.
  __device__ void init(const TrellisReverse& p, const TrellisBlockCoord& coord, int output_warps) const {
    const int memory = coord.memory, width = p.shape.width(memory), M = p.shape.M;
    RowSource<T>* const source = sources();
    const auto rows = [&](const InputTensor<4>& x, int cols, TokenTile to) {
      return row_source<T>(x, coord.chunked.sequence.batch, coord.head, cols, to);
    };
    source[0] = rows(p.x[memory], width, kX), source[1] = rows(p.w[memory], width, kW);
    source[2] = rows(p.l[memory], M, kL), source[3] = rows(p.u[memory], M, kU);
    source[4] = rows(p.z[memory], M, kZ), source[5] = rows(p.a, M, kA);
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full() + s, arrival_count(1));
      init_barrier(dz_full() + s, arrival_count(kStateWarps));
      init_barrier(empty() + s, arrival_count(output_warps));
    }
    for (int stage = 0; stage < kMemoryStages; ++stage) {
      init_barrier(memory_full() + stage, 32 + arrival_count(1));
      init_barrier(memory_empty() + stage, arrival_count(output_warps));
      init_barrier(gradient_full() + stage, arrival_count(kStateWarps));
      init_barrier(gradient_empty() + stage, arrival_count(output_warps));
    }
  }
};

__device__ inline int tiles_in(const Chunk& chunk) { return (chunk.length + kTile - 1) / kTile; }
__device__ inline int rows_in(const Chunk& chunk, int tile) {
  return min(chunk.length - tile * kTile, kTile);
}

// The chunk began in an earlier call: A', which z was computed from, is not A.
__device__ inline bool is_resumed(const InputTensor<4>& first, int64_t chunk) {
  return first.data != nullptr && chunk == 0;
}

}  // namespace girih::kernels

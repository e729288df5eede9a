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
struct TrellisReverseSpace {
  using Token = SharedTile<T, kTile, Tile>;
  using Memory = SharedTile<T, Tile, Tile>;
  // Warps of each role. A chunk has at most kReaders tiles; one more warp loads memories.
  static constexpr int kChain = 8, kReaders = kMostChunk / kTile, kLoaders = 3;
  static constexpr int kThreads = (kChain + kReaders + kLoaders + 1) * 32;
  static constexpr int kStages = Tile == 64 ? 8 : 4, kPlaces = Tile == 64 ? 5 : 1;
  // The state warps load the next tile before they store the current one: the ring holds a whole chunk and
  // that tile.
  static constexpr bool kAhead = Tile == 64;
  static_assert(!kAhead || kStages > kReaders);
  // Tiles of a stage: x, w, l and u; l scaled by e^{L_t}; the terms of du from reads in the chunk; z and a,
  // which dz and -J du replace.
  enum TokenTile : int { kX, kW, kL, kU, kWeighed, kDirect, kZ, kA, kTokenTiles };
  // Position of a tile: the last of its chunk, which is processed before the others; tile 0 of its chunk; in
  // a chunk that began in an earlier call (is_resumed); tile 0 of the sequence.
  enum Mark : int { kEnters = 1, kLeaves = 2, kResumed = 4, kEnds = 8 };
  // Scalars of a stage: Fit, gates and the factor -gamma e^{L_C - L} of each token; the decay e^{L_C}; dL
  // from the tile's output warp, for this tile and the later tiles of the chunk.
  struct Numbers {
    Fit fits[kTile];
    TokenGate gates[kTile];
    float step[kTile], decay;
    int marks, unused[2];
    float dL[kReaders][kTile];
  };
  static constexpr int kSources = 6;  // x, w, l, u, z and a
  static constexpr int kTiles = kStages * kTokenTiles * Token::kBytes,
                       kMemories = 2 * kPlaces * Memory::kBytes,
                       kNumbers = kStages * static_cast<int>(sizeof(Numbers)),
                       kTable = 2 * kTile * kChain * static_cast<int>(sizeof(float4));
  static constexpr int kBytes = kTiles + kMemories + kNumbers + kTable + (3 * kStages + 4 * kPlaces) * 8 +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  // With a weight of phi: the WeightFit of each token, in 16 bytes.
  static constexpr int kWeighted = (kBytes + 15) / 16 * 16,
                       kWeightedBytes = kWeighted + kStages * kTile * static_cast<int>(sizeof(float4));

  unsigned char* base;

  __device__ Token token(int stage, TokenTile which) const {
    return {reinterpret_cast<T*>(base + (stage * kTokenTiles + which) * Token::kBytes)};
  }
  // Ring of A before a chunk, and ring of G after it.
  __device__ Memory memory(int place) const {
    return {reinterpret_cast<T*>(base + kTiles + 2 * place * Memory::kBytes)};
  }
  __device__ Memory gradient(int place) const {
    return {reinterpret_cast<T*>(base + kTiles + (2 * place + 1) * Memory::kBytes)};
  }
  __device__ Numbers& numbers(int stage) const {
    return reinterpret_cast<Numbers*>(base + kTiles + kMemories)[stage];
  }
  __device__ float4* weight_fits(int stage) const {
    return reinterpret_cast<float4*>(base + kWeighted) + stage * kTile;
  }
  // Sums of a row for every warp, [warp][row]; two buffers alternate by tile.
  __device__ float4* table(unsigned tiles) const {
    return reinterpret_cast<float4*>(base + kTiles + kMemories + kNumbers) + (tiles & 1) * kTile * kChain;
  }
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(base + kTiles + kMemories + kNumbers + kTable);
  }
  __device__ uint64_t* written() const { return full() + kStages; }
  __device__ uint64_t* empty() const { return written() + kStages; }
  __device__ uint64_t* brought() const { return empty() + kStages; }  // memory A
  __device__ uint64_t* read() const { return brought() + kPlaces; }   // memory A
  __device__ uint64_t* left() const { return read() + kPlaces; }      // gradient G
  __device__ uint64_t* taken() const { return left() + kPlaces; }     // gradient G

  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(taken() + kPlaces); }

  // Called by one thread. `readers` warps release a tile, a memory and a gradient.
  __device__ void init(const TrellisReverse& p, const TrellisPart& part, int readers) const {
    const int memory = part.memory, width = p.shape.width(memory), M = p.shape.M;
    RowSource<T>* const source = sources();
    const auto rows = [&](const In<4>& x, int cols, TokenTile to) {
      return row_source<T>(x, part.of.sequence.batch, part.head, cols, to);
    };
    source[0] = rows(p.x[memory], width, kX), source[1] = rows(p.w[memory], width, kW);
    source[2] = rows(p.l[memory], M, kL), source[3] = rows(p.u[memory], M, kU);
    source[4] = rows(p.z[memory], M, kZ), source[5] = rows(p.a, M, kA);
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full() + s, once(1));
      init_barrier(written() + s, once(kChain));
      init_barrier(empty() + s, once(readers));
    }
    for (int place = 0; place < kPlaces; ++place) {
      init_barrier(brought() + place, 32 + once(1));
      init_barrier(read() + place, once(readers));
      init_barrier(left() + place, once(kChain));
      init_barrier(taken() + place, once(readers));
    }
  }
};

__device__ inline int tiles_in(const Chunk& chunk) { return (chunk.length + kTile - 1) / kTile; }
__device__ inline int rows_in(const Chunk& chunk, int tile) {
  return min(chunk.length - tile * kTile, kTile);
}

// The chunk began in an earlier call: A', which z was computed from, is not A.
__device__ inline bool is_resumed(const In<4>& first, int64_t chunk) {
  return first.data != nullptr && chunk == 0;
}

}  // namespace girih::kernels

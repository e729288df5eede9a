// What the reverse pass's warps share. A block has one sequence, head and memory.
//
// Tokens go through a ring of stages, 16 a stage, from the last one on: `full` once a loader has brought
// them, `written` once the chain has left dz and -J du, `empty` once the readers have taken them. The memory
// before every chunk comes through places of its own, and G after it goes through others from the chain to
// the readers.
#pragma once

#include "trellis/reads.cuh"

namespace girih::kernels {

template <typename T, int Tile>
struct TrellisReverseSpace {
  using Token = SharedTile<T, kTile, Tile>;
  using Memory = SharedTile<T, Tile, Tile>;
  // Warps: the chain's, a chunk's readers, those that load tokens, and one that loads memories.
  static constexpr int kChain = 8, kReaders = kMostChunk / kTile, kLoaders = 3;
  static constexpr int kThreads = (kChain + kReaders + kLoaders + 1) * 32;
  static constexpr int kStages = Tile == 64 ? 8 : 4, kPlaces = Tile == 64 ? 5 : 1;
  // The chain takes the next tile before it leaves one: there are stages for a whole chunk and that tile.
  static constexpr bool kAhead = Tile == 64;
  static_assert(!kAhead || kStages > kReaders);
  // x, w, l and u; l times e^{L_t}; what du is of the chunk's own reads; z and a, in whose places the chain
  // leaves dz and -J du.
  enum TokenTile : int { kX, kW, kL, kU, kWeighed, kDirect, kZ, kA, kTokenTiles };
  // Where a tile is: the last of its chunk and so the first that is taken, the first of its chunk, of a chunk
  // that goes on in one begun before (is_resumed), the sequence's first.
  enum Mark : int { kEnters = 1, kLeaves = 2, kResumed = 4, kEnds = 8 };
  // Of a stage, for each token: its Fit and gates, and how much of G x is in du. The chunk's decay. What the
  // tile's reader has of dL, of the tile itself and those after it.
  struct Numbers {
    Fit fits[kTile];
    TokenGate gates[kTile];
    float step[kTile], decay;
    int marks, unused[2];
    float dL[kReaders][kTile];
  };
  static constexpr int kSources = 6;  // of a tile's tokens
  static constexpr int kTiles = kStages * kTokenTiles * Token::kBytes,
                       kMemories = 2 * kPlaces * Memory::kBytes,
                       kNumbers = kStages * static_cast<int>(sizeof(Numbers)),
                       kTable = 2 * kTile * kChain * static_cast<int>(sizeof(float4));
  static constexpr int kBytes = kTiles + kMemories + kNumbers + kTable + (3 * kStages + 4 * kPlaces) * 8 +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  // With a weight of phi each token's WeightFit, in 16 bytes.
  static constexpr int kWeighted = (kBytes + 15) / 16 * 16,
                       kWeightedBytes = kWeighted + kStages * kTile * static_cast<int>(sizeof(float4));

  unsigned char* base;

  __device__ Token token(int stage, TokenTile which) const {
    return {reinterpret_cast<T*>(base + (stage * kTokenTiles + which) * Token::kBytes)};
  }
  // A before a chunk, and G after it.
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
  // Sums of a row by every warp, [warp][row], of this tile and the one before.
  __device__ float4* table(unsigned tiles) const {
    return reinterpret_cast<float4*>(base + kTiles + kMemories + kNumbers) + (tiles & 1) * kTile * kChain;
  }
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(base + kTiles + kMemories + kNumbers + kTable);
  }
  __device__ uint64_t* written() const { return full() + kStages; }
  __device__ uint64_t* empty() const { return written() + kStages; }
  __device__ uint64_t* brought() const { return empty() + kStages; }  // a memory
  __device__ uint64_t* read() const { return brought() + kPlaces; }   // and it may go
  __device__ uint64_t* left() const { return read() + kPlaces; }      // G
  __device__ uint64_t* taken() const { return left() + kPlaces; }     // and it may go

  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(taken() + kPlaces); }

  // By one thread. So many readers give a tile and memories back.
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

// The chunk goes on in one that was begun before: what z was made with, A', is not A.
__device__ inline bool is_resumed(const In<4>& first, int64_t chunk) {
  return first.data != nullptr && chunk == 0;
}

}  // namespace girih::kernels

// What the scan's warps share. A block has one sequence, head and memory.
//
// Tokens go through a ring of stages, 16 a stage: `full` once a loader has brought them, `written` once the
// chain has left what they write, `empty` once the readers have taken it. The memory before every chunk goes
// through places of its own, from the chain to the readers and to the warp that stores it.
#pragma once

#include <type_traits>

#include "trellis/reads.cuh"

namespace girih::kernels {

// Whether the blocks of two memories read together: r goes from one to the other.
__host__ __device__ inline bool has_pairs(const TrellisScan& p) {
  return p.o.data != nullptr && p.shape.memories == 2;
}

template <typename T, int Tile>
struct TrellisScanSpace {
  using Token = SharedTile<T, kTile, Tile>;
  using Memory = SharedTile<T, Tile, Tile>;
  // Warps: the chain's, readers as many as a chunk may have tiles, and those that load and store.
  static constexpr int kChain = Tile / 16, kReaders = kMostChunk / kTile, kLoaders = 3;
  static constexpr int kThreads = (kChain + kReaders + kLoaders + 1) * 32;
  static constexpr int kStages = Tile == 64 ? 16 : 7, kPlaces = Tile == 64 ? 5 : 2;
  // Chunks of one tile may be looked ahead of (scan_short_chain.cuh): of bf16, whose range scores keep to.
  static constexpr bool kLooksAhead = Tile == 64 && std::is_same<T, __nv_bfloat16>::value;
  // A loader has two tiles under way, and a whole chunk may be between them.
  static_assert(kStages >= kLoaders + kReaders);
  // x and x times its weight, -gamma_t e^{L_C - L_t}; a, in whose place the chain leaves z; of the memory of
  // keys q, in whose place a reader leaves r, and of that of values the r that has been sent; u.
  enum TokenTile : int { kX, kWeighed, kA, kR, kU, kTokenTiles };
  // Where a tile is: a chunk's first, the sequence's last, in a chunk that is not complete, in one that goes
  // on where it was begun before.
  enum Mark : int { kEnters = 1, kEnds = 2, kOpen = 4, kGoesOn = 8 };
  // Of tokens r and r + 8 the sums of a, and the chunk's decay: what a lane of the chain needs.
  struct alignas(16) RowNumbers {
    float sum_a[2], decay, unused;
  };
  // Of a stage, for each token: its Fit and its gates. The tile's marks.
  struct Numbers {
    Fit fits[kTile];
    TokenGate gates[kTile];
    RowNumbers rows[kTile / 2];
    int marks, unused[3];
  };
  // Of a stage, where the chain looks a chunk ahead: X X~^T, of this chunk's tokens and the weighed ones of
  // the one before, rounded to T, as a left factor.
  using Scores = uint4[32];
  static constexpr int kSources = 3;  // of a tile's tokens
  static constexpr int kTiles = kStages * kTokenTiles * Token::kBytes, kMemories = kPlaces * Memory::kBytes,
                       kNumbers = kStages * static_cast<int>(sizeof(Numbers)),
                       kTable = 2 * kTile * kChain * static_cast<int>(sizeof(Moments)),
                       kScores = kLooksAhead ? kStages * static_cast<int>(sizeof(Scores)) : 0;
  static constexpr int kBytes = kTiles + kMemories + kNumbers + kTable + kScores +
                                (4 * kStages + 2 * kPlaces) * 8 +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  // With a weight of phi there are more sums of a row, and more is kept of a token.
  static constexpr int kWeighted = (kBytes + 15) / 16 * 16,
                       kWeightedBytes =
                           kWeighted + kTable + kStages * kTile * static_cast<int>(sizeof(WeightFit));

  unsigned char* base;

  __device__ Token token(int stage, TokenTile which) const {
    return {reinterpret_cast<T*>(base + (stage * kTokenTiles + which) * Token::kBytes)};
  }
  __device__ Memory memory(int place) const {
    return {reinterpret_cast<T*>(base + kTiles + place * Memory::kBytes)};
  }
  __device__ Numbers& numbers(int stage) const {
    return reinterpret_cast<Numbers*>(base + kTiles + kMemories)[stage];
  }
  // A moment of a row by all warps, of this tile and the one before. Warp w's lies at w ^ which: four lanes
  // store a row's four, to places of different banks.
  __device__ float* moments(unsigned tiles, int which, int row) const {
    return reinterpret_cast<float*>(base + kTiles + kMemories + kNumbers) +
           (((tiles & 1) * 4 + which) * kTile + row) * kChain;
  }
  // The same of weighed_moments_of_rows().
  __device__ float* weighed_moments(unsigned tiles, int which, int row) const {
    return reinterpret_cast<float*>(base + kWeighted) + (((tiles & 1) * 4 + which) * kTile + row) * kChain;
  }
  __device__ WeightFit* weight_fits(int stage) const {
    return reinterpret_cast<WeightFit*>(base + kWeighted + kTable) + stage * kTile;
  }
  __device__ uint4& scores(int stage) const {  // of the lane
    return reinterpret_cast<Scores*>(base + kTiles + kMemories + kNumbers + kTable)[stage][lane()];
  }
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(base + kTiles + kMemories + kNumbers + kTable + kScores);
  }
  __device__ uint64_t* written() const { return full() + kStages; }
  __device__ uint64_t* empty() const { return written() + kStages; }
  __device__ uint64_t* sent() const { return empty() + kStages; }  // r, from the memory of keys
  __device__ uint64_t* left() const { return sent() + kStages; }   // the memory before a chunk
  __device__ uint64_t* taken() const { return left() + kPlaces; }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(taken() + kPlaces); }

  // By one thread. So many readers give a tile and a memory back; r of the keys' block is taken by that of
  // values before its stage is free.
  __device__ void init(const TrellisScan& p, const TrellisPart& part, int readers) const {
    const int memory = part.memory;
    const bool reads = p.o.data != nullptr, stores = p.memories[memory] != nullptr;
    RowSource<T>* const source = sources();
    const auto rows = [&](const In<4>& x, int cols, TokenTile to) {
      return row_source<T>(x, part.of.sequence.batch, part.head, cols, to);
    };
    source[0] = rows(p.x[memory], p.shape.width(memory), kX), source[1] = rows(p.a, p.shape.M, kA);
    if (memory == 0 && reads) source[2] = rows(p.q, p.shape.D, kR);
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full() + s, once(1));
      init_barrier(written() + s, once(kChain));
      init_barrier(empty() + s, once(readers) + (has_pairs(p) && memory == 0 ? 1 : 0));
      init_barrier(sent() + s, 1);
    }
    for (int place = 0; place < kPlaces; ++place) {
      init_barrier(left() + place, once(kChain));
      init_barrier(taken() + place, once(readers + (stores ? 1 : 0)));
    }
  }
};

}  // namespace girih::kernels

// Shared memory of the scan. A block has one sequence, head and memory.
//
// The tokens pass through a ring of stages with 16 tokens a stage. Barriers of a stage: `full` (producer
// warps have loaded the tokens), `written` (the state warps have stored u and z), `empty` (the output warps
// have released the stage). The memory before every chunk passes through a second ring of kPlaces stages,
// from the state warps to the output warps and to the warp that stores memories.
#pragma once

#include <type_traits>

#include "trellis/reads.cuh"

namespace girih::kernels {

// Whether the blocks of the two memories are a cluster: r goes from the block of keys to the block of values.
__host__ __device__ inline bool has_pairs(const TrellisScan& p) {
  return p.o.data != nullptr && p.shape.memories == 2;
}

template <typename T, int Tile>
struct TrellisScanSpace {
  using Token = SharedTile<T, kTile, Tile>;
  using Memory = SharedTile<T, Tile, Tile>;
  // Warps of each role. A chunk has at most kReaders tiles; one more warp stores memories.
  static constexpr int kChain = Tile / 16, kReaders = kMostChunk / kTile, kLoaders = 3;
  static constexpr int kThreads = (kChain + kReaders + kLoaders + 1) * 32;
  static constexpr int kStages = Tile == 64 ? 16 : 7, kPlaces = Tile == 64 ? 5 : 2;
  // The state warps may compute a chunk ahead if a chunk has one tile (scan_short_chain.cuh). The scores fit
  // the range of bf16, not of fp16.
  static constexpr bool kLooksAhead = Tile == 64 && std::is_same<T, __nv_bfloat16>::value;
  // A producer warp has two tiles in flight, and up to a whole chunk of other tiles lies between these two.
  static_assert(kStages >= kLoaders + kReaders);
  // Tiles of a stage: x; x scaled by -gamma_t e^{L_C - L_t}; a, which z replaces; in the block of keys q,
  // which r replaces, and in the block of values the r that it receives; u.
  enum TokenTile : int { kX, kWeighed, kA, kR, kU, kTokenTiles };
  // Position of a tile: it starts a chunk, it ends the sequence, its chunk is incomplete, its chunk started
  // in an earlier call.
  enum Mark : int { kEnters = 1, kEnds = 2, kOpen = 4, kGoesOn = 8 };
  // Sums of a over the slots for tokens r and r + 8, and the decay e^{L_C} of the chunk: the scalars of a
  // lane of the state warps.
  struct alignas(16) RowNumbers {
    float sum_a[2], decay, unused;
  };
  // Scalars of a stage: Fit and gates of each token, the RowNumbers, and the marks of the tile.
  struct Numbers {
    Fit fits[kTile];
    TokenGate gates[kTile];
    RowNumbers rows[kTile / 2];
    int marks, unused[3];
  };
  // Scores X X~^T of a stage, rounded to T, as an A fragment: X of this chunk, X~ the scaled X of the chunk
  // before (scan_short_chain.cuh).
  using Scores = uint4[32];
  static constexpr int kSources = 3;  // x, a and q
  static constexpr int kTiles = kStages * kTokenTiles * Token::kBytes, kMemories = kPlaces * Memory::kBytes,
                       kNumbers = kStages * static_cast<int>(sizeof(Numbers)),
                       kTable = 2 * kTile * kChain * static_cast<int>(sizeof(Moments)),
                       kScores = kLooksAhead ? kStages * static_cast<int>(sizeof(Scores)) : 0;
  static constexpr int kBytes = kTiles + kMemories + kNumbers + kTable + kScores +
                                (4 * kStages + 2 * kPlaces) * 8 +
                                kSources * static_cast<int>(sizeof(RowSource<T>));
  // A weight of phi needs more sums of a row, and a WeightFit for each token.
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
  // A moment of a row for all warps; two buffers alternate by tile. The value of warp w is at index w ^
  // which: four lanes store the four moments of a row to different banks.
  __device__ float* moments(unsigned tiles, int which, int row) const {
    return reinterpret_cast<float*>(base + kTiles + kMemories + kNumbers) +
           (((tiles & 1) * 4 + which) * kTile + row) * kChain;
  }
  // The same for the sums of weighed_moments_of_rows().
  __device__ float* weighed_moments(unsigned tiles, int which, int row) const {
    return reinterpret_cast<float*>(base + kWeighted) + (((tiles & 1) * 4 + which) * kTile + row) * kChain;
  }
  __device__ WeightFit* weight_fits(int stage) const {
    return reinterpret_cast<WeightFit*>(base + kWeighted + kTable) + stage * kTile;
  }
  __device__ uint4& scores(int stage) const {  // of the calling lane
    return reinterpret_cast<Scores*>(base + kTiles + kMemories + kNumbers + kTable)[stage][lane()];
  }
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(base + kTiles + kMemories + kNumbers + kTable + kScores);
  }
  __device__ uint64_t* written() const { return full() + kStages; }
  __device__ uint64_t* empty() const { return written() + kStages; }
  __device__ uint64_t* sent() const { return empty() + kStages; }  // r of the block of keys
  __device__ uint64_t* left() const { return sent() + kStages; }   // memory before a chunk
  __device__ uint64_t* taken() const { return left() + kPlaces; }
  __device__ RowSource<T>* sources() const { return reinterpret_cast<RowSource<T>*>(taken() + kPlaces); }

  // Called by one thread. `readers` warps release a tile and a memory. In the block of keys a stage also
  // waits until the block of values has loaded r.
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

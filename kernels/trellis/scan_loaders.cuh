// Producer warps of the scan, which take the tiles round-robin, and the warp that stores memories.
#pragma once

#include "trellis/scan_space.cuh"

namespace girih::kernels {

// Iterates over the chunks of a sequence and their tiles. Short: a chunk is one tile.
template <bool Short>
struct TileWalk {
  const TrellisShape& shape;
  const ChunkedSequence& of;
  int64_t chunk_number = 0;
  int first = 0;  // token of the chunk at which the tile starts
  Chunk chunk;

  __device__ TileWalk(const TrellisShape& shape, const ChunkedSequence& of) : shape(shape), of(of) {
    enter();
  }
  __device__ bool done() const { return chunk_number >= of.chunks; }
  __device__ int rows() const { return min(chunk.length - first, kTile); }
  template <class Space>
  __device__ int marks(bool resumed) const {
    const bool last = first + kTile >= chunk.length;
    return (first == 0 ? Space::kEnters : 0) | (last && chunk_number + 1 == of.chunks ? Space::kEnds : 0) |
           (chunk.complete ? 0 : Space::kOpen) | (resumed && chunk_number == 0 ? Space::kGoesOn : 0);
  }
  __device__ void skip(int tiles) {
    if constexpr (Short) {
      chunk_number += tiles;
      enter();
    } else {
#pragma unroll 1
      for (; tiles > 0 && !done(); --tiles) next();
    }
  }

 private:
  __device__ void next() {
    first += kTile;
    if (first < chunk.length) return;
    first = 0, ++chunk_number;
    enter();
  }
  __device__ void enter() {
    if (!done()) chunk = chunk_of(shape.grid, of, chunk_number);
  }
};

// Short: a chunk is one tile, and the state warps compute one chunk ahead.
template <typename T, int Tile, bool Short>
struct TrellisScanLoader {
  using Space = TrellisScanSpace<T, Tile>;
  using Token = typename Space::Token;
  using TokenTile = typename Space::TokenTile;
  static constexpr int kPacks = Tile / 8, kOfLane = kTile * kPacks / 32;

  const TrellisScan& p;
  const TrellisPart& part;
  const Space& space;

  // Starts the copies of a tile to its stage.
  __device__ void start(const TileWalk<Short>& at, int stage) const {
    const int64_t batch = part.of.sequence.batch, token = at.chunk.start + at.first;
    const int rows = at.rows(), sources = part.memory == 0 && p.o.data != nullptr ? 3 : 2;
#pragma unroll 1
    for (int i = 0; i < sources; ++i) {
      const auto& source = space.sources()[i];
      source.bring(space.token(stage, static_cast<TokenTile>(source.to)), token, rows);
    }
    load_gates(space.numbers(stage).gates, p.shape, p.gates, batch, token, rows, part.head);
    commit_copies();
  }

  // Computes X X~^T. Waits until the stage before, which has X~, is full.
  __device__ void score(const Turn& turn) const {
    const int before = (turn.place == 0 ? Space::kStages : turn.place) - 1;
    Operand<Tile / 16> x;
    Sums<2> scores;
    load_blocks(x, space.token(turn.place, Space::kX));
    fill(scores, 0.f);
    wait(space.full() + before, turn.place == 0 ? turn.parity ^ 1 : turn.parity);
    add_product_transposed<T>(scores, x, space.token(before, Space::kWeighed));
    Operand<1> rounded;
    round_to<T>(rounded, scores);
    const auto& at = rounded.at[0];
    space.scores(turn.place) = {at[0], at[1], at[2], at[3]};
  }

  // Transforms a tile whose copies have arrived: scales x, and sums a over the slots.
  __device__ void finish(const Turn& turn, int marks, bool follows) const {
    const int stage = turn.place;
    auto& numbers = space.numbers(stage);
    const Token x = space.token(stage, Space::kX), weighed = space.token(stage, Space::kWeighed),
                a = space.token(stage, Space::kA);
#pragma unroll 2
    for (int i = 0; i < kOfLane; ++i) {
      const int at = i * 32 + lane(), row = at / kPacks, col = at % kPacks * 8;
      Pack<8> pack = load<8>(&x.at(row, col));
      const TokenGate gate = numbers.gates[row];
      const float weight = -gate.gamma * exp2_fast(gate.after);
#pragma unroll
      for (int e = 0; e < 8; ++e) pack.at[e] *= weight;
      store<8>(&weighed.at(row, col), pack);
    }
    // Two lanes have a row.
    float sum = 0.f;
#pragma unroll 2
    for (int i = 0; i < kPacks / 2; ++i) {
      const Pack<8> pack = load<8>(&a.at(lane() / 2, (2 * i + lane() % 2) * 8));
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += pack.at[e];
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (lane() % 2 == 0) numbers.rows[lane() / 2 % 8].sum_a[lane() / 16] = sum;
    // e^{L_C}, from the gate of the tile's token 0.
    if (lane() < 8) numbers.rows[lane()].decay = exp2_fast(numbers.gates[0].through + numbers.gates[0].after);
    if (lane() == 0) numbers.marks = marks;
    if (Short && follows) score(turn);
    arrive_once(space.full() + stage);
  }

  // The copies of a tile are in flight while the warp transforms its tile before.
  __device__ void run(int loader) const {
    const bool resumed = p.first[part.memory].data != nullptr;
    Turn turn, before;
    int marks = 0;
    bool waits = false, follows = false;  // a tile of this warp is in flight; another tile precedes it
    TileWalk<Short> at(p.shape, part.of);
    at.skip(loader), turn.skip(loader, Space::kStages);
    for (; !at.done(); at.skip(Space::kLoaders), turn.skip(Space::kLoaders, Space::kStages)) {
      wait(space.empty() + turn.place, turn.parity ^ 1);
      start(at, turn.place);
      if (waits) {
        wait_copies<1>();
        __syncwarp();
        finish(before, marks, follows);
      }
      before = turn, marks = at.template marks<Space>(resumed), waits = true;
      follows = at.chunk_number > 0 || at.first > 0;
    }
    if (!waits) return;
    wait_copies<0>();
    __syncwarp();
    finish(before, marks, follows);
  }
};

template <typename T, int Tile>
__device__ inline void store_scan(const TrellisScan& p, const TrellisPart& part,
                                  const TrellisScanSpace<T, Tile>& space) {
  if (p.memories[part.memory] == nullptr) return;
  T* to = static_cast<T*>(p.memories[part.memory]);
  Turn turn;
  for (int64_t i = 0; i < part.of.chunks; ++i) {
    wait(space.left() + turn.place, turn.parity);
    store_bytes<Tile * Tile* static_cast<int>(sizeof(T))>(
        to + kept_place<T, Tile>(p.shape, part.of.first + i, part.head), space.memory(turn.place).data);
    arrive_once(space.taken() + turn.place);
    turn.next(TrellisScanSpace<T, Tile>::kPlaces);
  }
}

}  // namespace girih::kernels

// Producer warps of the reverse scan, which take the tiles round-robin, and the warp that loads memories.
#pragma once

#include "trellis/reverse_space.cuh"

namespace girih::kernels {

// Short: a chunk has at most one tile.
template <typename T, int Tile, bool Short, bool Weighted>
struct TrellisReverseLoader {
  using Space = TrellisReverseSpace<T, Tile>;
  using Token = typename Space::Token;
  using TokenTile = typename Space::TokenTile;
  static constexpr int K = Tile / 16, kPacks = Tile / 8, kOfLane = kTile * kPacks / 32;

  const TrellisReverse& p;
  const TrellisPart& part;
  const Space& space;

  // A tile in flight: its stage, the number of tiles behind it in the chunk (these were loaded earlier), the
  // tokens of the final tile of the chunk, and the marks for the state warps.
  struct Place {
    Turn stage;
    int after, rows_of_last, marks;
    bool any = false;
  };

  __device__ void start(const Chunk& chunk, int tile, int stage) const {
    const int rows = rows_in(chunk, tile);
    const int64_t batch = part.of.sequence.batch, token = chunk.start + tile * kTile;
#pragma unroll 1
    for (int i = 0; i < Space::kSources; ++i) {
      const auto& source = space.sources()[i];
      source.bring(space.token(stage, static_cast<TokenTile>(source.to)), token, rows);
    }
    auto& numbers = space.numbers(stage);
    load_gates(numbers.gates, p.shape, p.gates, batch, token, rows, part.head);
    if (lane() < kTile) {
      const bool has = lane() < rows;
      const float* const fit =
          row_of<float>(p.fit[part.memory], batch, token + (has ? lane() : 0), part.head);
      copy_async(shared_address(numbers.fits + lane()), fit, has);
      if (Weighted) copy_async(shared_address(space.weight_fits(stage) + lane()), fit + 4, has);
    }
    commit_copies();
  }

  // Computes e^{L_t} l_t and, with E_ti = e^{L_t - L_i},
  //     direct_i = -gamma_i sum over t >= i of E_ti (w_t.x_i) l_t
  __device__ void finish(const Place& at) const {
    const int stage = at.stage.place;
    auto& numbers = space.numbers(stage);
    const Token x = space.token(stage, Space::kX), l = space.token(stage, Space::kL),
                weighed = space.token(stage, Space::kWeighed), direct = space.token(stage, Space::kDirect);
#pragma unroll 1
    for (int i = 0; i < kOfLane; ++i) {
      const int index = i * 32 + lane(), row = index / kPacks, col = index % kPacks * 8;
      Pack<8> pack = load<8>(&l.at(row, col));
      const float weight = exp2_fast(numbers.gates[row].through);
#pragma unroll
      for (int e = 0; e < 8; ++e) pack.at[e] *= weight;
      store<8>(&weighed.at(row, col), pack);
    }
    if (lane() < kTile) {
      const TokenGate gate = numbers.gates[lane()];
      numbers.step[lane()] = -gate.gamma * exp2_fast(gate.after);
      if (lane() == 0) numbers.decay = exp2_fast(gate.through + gate.after), numbers.marks = at.marks;
    }
    const Through L(numbers.gates);
    const float2 gamma{numbers.gates[lane_row()].gamma, numbers.gates[lane_row() + 8].gamma};
    Operand<1> scores[Space::kReaders];
#pragma unroll
    for (int j = 0; j < Space::kReaders; ++j) {
      if (j > at.after) break;
      // Other producer warps load the later tiles of the chunk.
      const int other = before(stage, j);
      if (j > 0) wait(space.full() + other, at.stage.parity ^ (other > stage ? 1 : 0));
      Sums<2> s;
      fill(s, 0.f);
      add_product_of_tile_rows<K>(s, x, 0, space.token(other, Space::kW), 0);
      weigh_later(s, L, space.numbers(other).gates, j == 0, j == at.after ? at.rows_of_last : kTile);
      scale_rows(s, {-gamma.x, -gamma.y});
      round_to<T>(scores[j], s);
    }
#pragma unroll 1
    for (int n = 0; n < Tile / 8; n += 4) {
      Sums<4> sums;
      fill(sums, 0.f);
#pragma unroll
      for (int j = 0; j < Space::kReaders; ++j) {
        if (j > at.after) break;
        add_product<T>(sums, scores[j].at[0], space.token(before(stage, j), Space::kL), 0, 8 * n);
      }
      Operand<2> rounded;
      round_to<T>(rounded, sums);
      store_blocks(direct, 0, 8 * n, rounded);
    }
    arrive_once(space.full() + stage);
  }

  // The stage that was filled `tiles` stages earlier.
  __device__ static int before(int stage, int tiles) {
    return stage >= tiles ? stage - tiles : stage - tiles + Space::kStages;
  }

  // A producer warp transforms a tile when it comes to its next tile, so that the copies have time. Starting
  // the next copies earlier would wait for a stage of the output warps while the state warps wait for this
  // tile.
  __device__ void run(int loader) const {
    Turn turn;
    Place last;
    if constexpr (Short) {
      turn.skip(loader, Space::kStages);
      for (int64_t i = part.of.chunks - 1 - loader; i >= 0; i -= Space::kLoaders) {
        bring(last, turn, chunk_of(p.shape.grid, part.of, i), i, 0, 1);
        turn.skip(Space::kLoaders, Space::kStages);
      }
    } else {
      int mine = loader;
      for (int64_t i = part.of.chunks - 1; i >= 0; --i) {
        const Chunk chunk = chunk_of(p.shape.grid, part.of, i);
        const int tiles = tiles_in(chunk);
        for (int tile = tiles - 1; tile >= 0; --tile, turn.next(Space::kStages)) {
          if (mine-- > 0) continue;
          mine = Space::kLoaders - 1;
          bring(last, turn, chunk, i, tile, tiles);
        }
      }
    }
    finish_last(last);
  }

 private:
  __device__ void bring(Place& last, const Turn& turn, const Chunk& chunk, int64_t number, int tile,
                        int tiles) const {
    finish_last(last);
    wait(space.empty() + turn.place, turn.parity ^ 1);
    start(chunk, tile, turn.place);
    last = {turn, tiles - 1 - tile, rows_in(chunk, tiles - 1), marks(number, tile, tiles), true};
  }
  __device__ int marks(int64_t chunk, int tile, int tiles) const {
    return (tile == tiles - 1 ? Space::kEnters : 0) | (tile == 0 ? Space::kLeaves : 0) |
           (is_resumed(p.first[part.memory], chunk) ? Space::kResumed : 0) |
           (chunk == 0 && tile == 0 ? Space::kEnds : 0);
  }
  __device__ void finish_last(const Place& last) const {
    if (!last.any) return;
    wait_copies<0>();
    __syncwarp();
    finish(last);
  }
};

// Loads the memory that precedes every chunk. For a chunk that began in an earlier call, loads A' and then A.
template <typename T, int Tile>
__device__ inline void bring_memories(const TrellisReverse& p, const TrellisPart& part,
                                      const TrellisReverseSpace<T, Tile>& space) {
  using Space = TrellisReverseSpace<T, Tile>;
  const int memory = part.memory;
  const T* kept = static_cast<const T*>(p.memories[memory]);
  Turn turn;
  const auto arrived = [&] {
    arrive_after_copies(space.brought() + turn.place);
    arrive_once(space.brought() + turn.place);
    turn.next(Space::kPlaces);
  };
  for (int64_t i = part.of.chunks - 1; i >= 0; --i) {
    if (is_resumed(p.first[memory], i)) {
      wait(space.read() + turn.place, turn.parity ^ 1);
      const auto to = space.memory(turn.place);
      for (int at = lane(); at < Tile * Tile; at += 32) to.at(at / Tile, at % Tile) = from_float<T>(0.f);
      __syncwarp();
      const auto& first = p.first[memory];
      const int64_t base = offset_of(first, part.sequence, part.head);
      const int width = p.shape.width(memory);
      for (int at = lane(); at < p.shape.slots * width; at += 32) {
        const int m = at / width, x = at % width;
        to.at(m, x) = from_float<T>(
            static_cast<const float*>(first.data)[base + m * first.stride[2] + x * first.stride[3]]);
      }
      arrived();
    }
    wait(space.read() + turn.place, turn.parity ^ 1);
    T* to = space.memory(turn.place).data;
    const T* from = kept + kept_place<T, Tile>(p.shape, part.of.first + i, part.head);
#pragma unroll
    for (int j = 0; j < Tile * Tile / 256; ++j) {
      copy_async(shared_address(to + 256 * j + 8 * lane()), from + 256 * j + 8 * lane(), true);
    }
    arrived();
  }
}

}  // namespace girih::kernels

// Output warps of the reverse scan: gradients of the tokens of a chunk. For either memory, with G the
// gradient of A at the end of the chunk and E_ti = e^{L_t - L_i},
//
//     c_i  = e^{L_C - L_i} (u_i G) + sum over t >= i of E_ti (u_i.l_t) w_t
//     dx_i = -gamma_i c_i + dz_i A'        dgamma_i = -x_i.c_i        da_i = -J du_i
//
// A gate decays what precedes its token in all later reads. So dg_j is the sum of
//     e^{L_t} l_t^T A w_t                                 t >= j
//     pair_ti = -gamma_i E_ti (w_t.x_i) (l_t.u_i)         i < j <= t
//     end_i   = -gamma_i e^{L_C - L_i} x_i.(u_i G)        i < j
//     e^{L_C} <G, A>
//
// gates.cu sums dL from the end: the same value pair_ti is added at t and subtracted at i, so that it cancels
// where it should. The output warps take the tiles of a chunk round-robin, from its last tile on.
#pragma once

#include "tile/row_store.h"
#include "trellis/reverse_space.cuh"

namespace girih::kernels {

// Short: a chunk has at most one tile.
template <typename T, int Tile, bool Short>
struct TrellisReverseReader {
  using Space = TrellisReverseSpace<T, Tile>;
  using Token = typename Space::Token;
  static constexpr int K = Tile / 16;

  const TrellisReverse& p;
  const TrellisPart& part;
  const Space& space;

  // A tile of an output warp: its chunk, the stage of the chunk's last tile, and the stage of its own tile.
  struct Own {
    Chunk chunk;
    Turn first, own;
    int tile, tiles;
    __device__ Own(const Chunk& chunk, const Turn& first, int tile, int tiles)
        : chunk(chunk), first(first), own(first), tile(tile), tiles(tiles) {
      own.skip(tiles - 1 - tile, Space::kStages);
    }
    // Stage of tile j; tiles are loaded from the last one on.
    __device__ int stage(int j) const {
      const int s = first.place + tiles - 1 - j;
      return s < Space::kStages ? s : s - Space::kStages;
    }
    __device__ int rows(int j) const { return rows_in(chunk, j); }
    __device__ int64_t token(int j) const { return chunk.start + j * kTile; }
  };

  // Calls f(col) for blocks of 16 columns. A loop, to save instruction cache (row_source.h).
  template <class F>
  __device__ static void for_columns(const F& f) {
#pragma unroll 1
    for (int col = 0; col < Tile; col += 16) f(col);
  }
  // Adds the lane's terms of the dot products of its two rows.
  __device__ static void add_dots(float2& dot, const Sums<2>& x, const Sums<2>& y) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        dot.x = fmaf(x.at[n][i], y.at[n][i], dot.x);
        dot.y = fmaf(x.at[n][2 + i], y.at[n][2 + i], dot.y);
      }
    }
  }
  // Sums the dot products over the quad, for all four lanes.
  __device__ static float2 whole(const float2& dot) { return {sum_over_row(dot.x), sum_over_row(dot.y)}; }

  // The lane's term of <G, A>, the trace of G A^T. The output warps of the chunk take blocks of 16 slots
  // round-robin.
  __device__ float product_of_states(const Own& at, const typename Space::Memory& G,
                                     const typename Space::Memory& A) const {
    float sum = 0.f;
    for (int m = at.tile * 16; m < p.shape.M; m += 16 * at.tiles) {
      Sums<2> block;
      fill(block, 0.f);
      add_product_of_tile_rows<K>(block, G, m, A, m);
      // The lane has rows lane_row() and lane_row() + 8 of columns 8 n + lane_col() and 8 n + lane_col() + 1.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (lane_col() + i == lane_row()) sum += block.at[0][i] + block.at[1][2 + i];
      }
    }
    return sum;
  }

  // Index of a token in [B, T, H].
  __device__ int64_t number(const Own& at, int j, int row) const {
    const TrellisShape& shape = p.shape;
    return (part.of.sequence.batch * shape.grid.tokens.tokens + at.token(j) + row) * shape.heads + part.head;
  }
  __device__ int64_t numbers() const {
    return p.shape.grid.tokens.batch * p.shape.grid.tokens.tokens * p.shape.heads;
  }

  // pair_ti for i in the output warp's tile and t in tile j, from the scores E (u_i.l_t): subtracts the sums
  // over t from dL of i, and stores the sums over i in the stage's scalars.
  __device__ void pairs(const Own& at, const Sums<2>& weighed, int j, float2 gamma, float2& dL) const {
    const Token x = space.token(at.own.place, Space::kX), w = space.token(at.stage(j), Space::kW);
    Sums<2> pair;
    fill(pair, 0.f);
    add_product_of_tile_rows<K>(pair, x, 0, w, 0);
    float taken[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int t = 8 * n + lane_col() + (e & 1), i = lane_row() + (e >> 1) * 8;
        const float value =
            j > at.tile || i < t ? -(e < 2 ? gamma.x : gamma.y) * weighed.at[n][e] * pair.at[n][e] : 0.f;
        taken[e >> 1] += value, sums[e & 1] += value;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_over_col(sums[i]);
        if (lane_row() == 0) {
          space.numbers(at.own.place).dL[j - at.tile][8 * n + lane_col() + i] = sum;
        }
      }
    }
    dL.x -= sum_over_row(taken[0]), dL.y -= sum_over_row(taken[1]);
  }

  // `memories` provides A', then A if A is not A'.
  template <class Memories>
  __device__ void read(const Own& at, const typename Space::Memory& G, const Memories& memories) const {
    const int s = at.own.place, memory = part.memory;
    const bool gated = p.dL != nullptr;
    auto& numbers_of = space.numbers(s);
    const auto& gates = numbers_of.gates;
    const float2 gamma{gates[lane_row()].gamma, gates[lane_row() + 8].gamma},
        after{gates[lane_row()].after, gates[lane_row() + 8].after};
    const Through L(gates);
    const Token x = space.token(s, Space::kX);
    float2 dL{0.f, 0.f};
    float end = 0.f;  // the lane's terms of dL at the end of the chunk

    // E_ti (u_i.l_t)
    Operand<K> u, z;
    load_blocks(u, space.token(s, Space::kU));
    Operand<1> scores[Space::kReaders];
#pragma unroll
    for (int j = 0; j < Space::kReaders; ++j) {
      if (at.tile + j >= at.tiles) break;
      const int other = at.stage(at.tile + j);
      Sums<2> sums;
      fill(sums, 0.f);
      add_product_transposed<T>(sums, u, space.token(other, Space::kL));
      weigh_later(sums, L, space.numbers(other).gates, j == 0, at.rows(at.tile + j));
      if (gated) pairs(at, sums, at.tile + j, gamma, dL);
      round_to<T>(scores[j], sums);
    }

    // c, dgamma, and dx = -gamma c + dZ A', which replaces the tile that the state warps no longer need
    const Token dx = space.token(s, Space::kDirect);
    const auto first = memories.first();
    load_blocks(z, space.token(s, Space::kZ));
    const float2 to_end{exp2_fast(after.x), exp2_fast(after.y)};
    float2 of_end{0.f, 0.f}, dgamma{0.f, 0.f};
    for_columns([&](int col) {
      Sums<2> c, own;
      fill(c, 0.f);
      add_product<T>(c, u, G, 0, col);
      scale_rows(c, to_end);
      load_wide<T>(own, x, 0, col);
      add_dots(of_end, c, own);
#pragma unroll
      for (int j = 0; j < Space::kReaders; ++j) {
        if (at.tile + j >= at.tiles) break;
        add_product<T>(c, scores[j].at[0], space.token(at.stage(at.tile + j), Space::kW), 0, col);
      }
      add_dots(dgamma, c, own);
      scale_rows(c, {-gamma.x, -gamma.y});
      add_product<T>(c, z, first, 0, col);
      Operand<1> rounded;
      round_to<T>(rounded, c);
      store_block(dx, 0, col, rounded.at[0]);
    });
    dgamma = whole(dgamma);
    if (lane_col() == 0) {
      float* to = p.dgammas + memory * numbers();
      if (lane_row() < at.rows(at.tile)) to[number(at, at.tile, lane_row())] = -dgamma.x;
      if (lane_row() + 8 < at.rows(at.tile)) to[number(at, at.tile, lane_row() + 8)] = -dgamma.y;
    }

    if (gated) {
      of_end = whole(of_end);
      of_end = {gamma.x * of_end.x, gamma.y * of_end.y};
      dL.x += of_end.x, dL.y += of_end.y;
      // All four lanes of a row have the sum: count it once.
      if (lane_col() == 0) end = -of_end.x - of_end.y;
      // e^{L_t} l_t^T A w_t
      const auto A = memories.second();
      const Token w = space.token(s, Space::kW);
      float2 dot{0.f, 0.f};
      load_blocks(u, space.token(s, Space::kL));
      for_columns([&](int col) {
        Sums<2> read, own;
        fill(read, 0.f);
        add_product<T>(read, u, A, 0, col);
        load_wide<T>(own, w, 0, col);
        add_dots(dot, read, own);
      });
      dot = whole(dot);
      dL.x = fmaf(exp2_fast(L.sum.x), dot.x, dL.x), dL.y = fmaf(exp2_fast(L.sum.y), dot.y, dL.y);
      end += numbers_of.decay * product_of_states(at, G, A);
      end = sum_over_col(sum_over_row(end));
      __syncwarp();
      if (lane_col() == 0) numbers_of.dL[0][lane_row()] += dL.x, numbers_of.dL[0][lane_row() + 8] += dL.y;
      __syncwarp();
      const int last = at.tiles - 1;
      if (lane() == 0) numbers_of.dL[last - at.tile][at.rows(last) - 1] += end;
      __syncwarp();
      float* to = p.dL + (memory * ((p.shape.grid.size + kTile - 1) / kTile) + at.tile) * numbers();
      for (int j = at.tile; j < at.tiles; ++j) {
        if (lane() < at.rows(j)) to[number(at, j, lane())] = numbers_of.dL[j - at.tile][lane()];
      }
    }
    __syncwarp();
    put(at, p.dx[memory], dx, p.shape.width(memory));
    put(at, p.da[memory], space.token(s, Space::kA), p.shape.M);
  }
  __device__ void put(const Own& at, const Out<4>& to, const Token& tile, int width) const {
    store_rows<1>(tile, row_of<T>(to, part.of.sequence.batch, at.token(at.tile), part.head), to.stride[1],
                  at.rows(at.tile), width, 0);
  }

  // The memories of a chunk. An output warp waits for each memory at its use, and releases all of them.
  struct Memories {
    const Space& space;
    Turn& turn;
    int& left;   // memories to release
    bool apart;  // A' and A differ

    __device__ typename Space::Memory first() const { return here(); }
    __device__ typename Space::Memory second() const {
      if (apart) leave();
      return here();
    }
    __device__ void leave() const {
      wait(space.brought() + turn.place, turn.parity);
      arrive_once(space.read() + turn.place);
      turn.next(Space::kPlaces);
      --left;
    }

   private:
    __device__ typename Space::Memory here() const {
      wait(space.brought() + turn.place, turn.parity);
      return space.memory(turn.place);
    }
  };

  __device__ void run(int reader) const {
    if constexpr (Short) {
      run_short(reader);
    } else {
      run_long(reader);
    }
  }

  // A chunk is one tile. Its output warp releases the tile and the memories.
  __device__ void run_short(int reader) const {
    // The ring of memories and the ring of gradients advance together: only the last chunk to be processed
    // may have a second memory. There may be fewer stages than output warps.
    Turn stage, place;
    const auto skip = [&](int chunks) {
      stage.skip(chunks, Space::kStages);
      for (int i = 0; i < chunks; ++i) place.next(Space::kPlaces);
    };
    skip(reader);
#pragma unroll 1
    for (int64_t i = part.of.chunks - 1 - reader; i >= 0; i -= Space::kReaders) {
      const bool apart = is_resumed(p.first[part.memory], i);
      int left = apart ? 2 : 1;
      wait(space.written() + stage.place, stage.parity);  // implies that G is stored
      Turn memory = place;
      // Hides the constants from the compiler, which otherwise unrolls into more registers than there are.
      int tile = 0, tiles = 1;
      asm volatile("" : "+r"(tile), "+r"(tiles));
      const Memories memories{space, memory, left, apart};
      read(Own(chunk_of(p.shape.grid, part.of, i), stage, tile, tiles), space.gradient(place.place),
           memories);
      while (left > 0) memories.leave();
      arrive_once(space.empty() + stage.place);
      arrive_once(space.taken() + place.place);
      skip(Space::kReaders);
    }
  }

  __device__ void run_long(int reader) const {
    Turn stage, place, memory;
    unsigned begun = 0;  // tiles of the chunks processed earlier
    for (int64_t i = part.of.chunks - 1; i >= 0; --i) {
      const Chunk chunk = chunk_of(p.shape.grid, part.of, i);
      const int tiles = tiles_in(chunk), mine = static_cast<int>((reader - begun) % Space::kReaders);
      const bool apart = is_resumed(p.first[part.memory], i);
      int left = apart ? 2 : 1;
      wait(space.left() + place.place, place.parity);
      const Memories memories{space, memory, left, apart};
      if (mine < tiles) {
        const Own at(chunk, stage, tiles - 1 - mine, tiles);
        // The state warps store the tiles in order: the later wait implies the earlier ones.
        wait(space.written() + at.own.place, at.own.parity);
        read(at, space.gradient(place.place), memories);
      }
      while (left > 0) memories.leave();
      for (int j = 0; j < tiles; ++j, stage.next(Space::kStages)) {
        wait(space.written() + stage.place, stage.parity);
        arrive_once(space.empty() + stage.place);
      }
      arrive_once(space.taken() + place.place);
      place.next(Space::kPlaces);
      begun += tiles;
    }
  }
};

}  // namespace girih::kernels

// Output warps of the scan: compute the reads of the memories and store o, u and z. They take the tiles of a
// chunk round-robin.
//
//     memory of keys      r_t = f(A_t q_t)    sent to the block of values; with one memory r is o
//     memory of values    o_t = A_t^T r_t
//
// All output warps release the tiles and the memory of a chunk. If chunks have at most one tile, only the
// output warp of the chunk releases these, and it multiplies by the memory before it waits for u.
#pragma once

#include "tile/cluster.h"
#include "trellis/scan_space.cuh"

namespace girih::kernels {

template <typename T, int Tile, bool Short, bool Weighted>
struct TrellisScanReader {
  using Space = TrellisScanSpace<T, Tile>;
  using Token = typename Space::Token;
  static constexpr int N = Tile / 8, K = Tile / 16;

  const TrellisScan& p;
  const TrellisPart& part;
  const Space& space;

  // A tile of an output warp: the stage of the chunk's tile 0, and the stage of its own tile.
  struct Own {
    Turn chunk, own;
    int tile;
    __device__ Own(const Turn& first, int tile) : chunk(first), own(first), tile(tile) {
      own.skip(tile, Space::kStages);
    }
    __device__ int stage(int j) const {
      const int s = chunk.place + j;
      return s < Space::kStages ? s : s - Space::kStages;
    }
  };

  // Adds the terms of the chunk's tokens to y; xs and ys are the two kinds of tiles.
  __device__ void finish(Sums<N>& y, const Operand<K>& w, const Own& at, typename Space::TokenTile xs,
                         typename Space::TokenTile ys) const {
    finish_read<T>(
        y, w, at.tile, [&](int j) { return space.token(at.stage(j), xs); },
        [&](int j) { return space.token(at.stage(j), ys); },
        [&](int j) { return space.numbers(at.stage(j)).gates; });
  }

  // R = f(Q A^T + ..), stored to the stage of the other block or to o. Calls then() after the product with
  // the memory.
  template <class Then>
  __device__ void read_keys(const Own& at, const typename Space::Memory& memory, int64_t token, int rows,
                            const Then& then) const {
    const int s = at.own.place;
    const Token tile = space.token(s, Space::kR);
    Operand<K> w;
    load_blocks(w, tile);
    Sums<N> y;
    fill(y, 0.f);
    add_product_transposed<T>(y, w, memory);
    then();
    finish(y, w, at, Space::kX, Space::kU);
    to_images<T>(p.shape.f, p.shape.slots, y);
    round_to<T>(w, y);
    store_blocks(tile, 0, 0, w);
    __syncwarp();
    if (!has_pairs(p)) {
      put(tile, p.o, token, rows, p.shape.M);
      return;
    }
    // The stage is empty here only after the other block has loaded r (space.init()), so the tile of the
    // other block is free too.
    if (lane() == 0) send(tile.data, Token::kBytes, space.sent() + s, 1);
  }

  // O = R A + .., and then() as above.
  template <class Then>
  __device__ void read_values(const Own& at, const typename Space::Memory& memory, int64_t token, int rows,
                              const Then& then) const {
    const int s = at.own.place;
    wait(space.sent() + s, at.own.parity);
    Operand<K> r;
    load_blocks(r, space.token(s, Space::kR));
    arrive_far(space.empty() + s, 0);
    Sums<N> o;
    fill(o, 0.f);
    add_product<T>(o, r, memory);
    then();
    finish(o, r, at, Space::kU, Space::kX);
    // The state warps no longer needs this tile: it is ready before u is full.
    const Token tile = space.token(s, Space::kWeighed);
    round_to<T>(r, o);
    store_blocks(tile, 0, 0, r);
    __syncwarp();
    put(tile, p.o, token, rows, p.shape.V);
  }

  __device__ void put(const Token& tile, const Out<4>& to, int64_t token, int rows, int width) const {
    store_rows<1>(tile, row_of<T>(to, part.of.sequence.batch, token, part.head), to.stride[1], rows, width,
                  0);
  }

  // Stores u, z and the fits of the tile for backward.
  __device__ void keep(int stage, int64_t token, int rows) const {
    const int64_t batch = part.of.sequence.batch;
    const auto keep = [&](const Out<4>& to, typename Space::TokenTile which) {
      if (to.data != nullptr) put(space.token(stage, which), to, token, rows, p.shape.M);
    };
    keep(p.u[part.memory], Space::kU);
    keep(p.z[part.memory], Space::kA);
    const auto& fits = p.fit[part.memory];
    if (fits.data == nullptr || lane() >= rows) return;
    float* const to = row_of<float>(fits, batch, token + lane(), part.head);
    *reinterpret_cast<Fit*>(to) = space.numbers(stage).fits[lane()];
    if constexpr (Weighted) {
      const WeightFit of_weight = space.weight_fits(stage)[lane()];
      *reinterpret_cast<float4*>(to + 4) = {of_weight.x, of_weight.y, 0.f, 0.f};
    }
  }

  template <class Then>
  __device__ void read(const Own& at, const typename Space::Memory& memory, int64_t token, int rows,
                       const Then& then) const {
    if (p.o.data == nullptr) {
      then();
    } else if (part.memory == 0) {
      read_keys(at, memory, token, rows, then);
    } else {
      read_values(at, memory, token, rows, then);
    }
    keep(at.own.place, token, rows);
  }

  __device__ void run(int reader) const {
    if constexpr (Short) {
      run_short(reader);
    } else {
      run_long(reader);
    }
  }

  // A chunk is one tile.
  __device__ void run_short(int reader) const {
    Turn stage, place;
    stage.skip(reader, Space::kStages), place.skip(reader, Space::kPlaces);
#pragma unroll 1
    for (int64_t i = reader; i < part.of.chunks; i += Space::kReaders) {
      const Chunk chunk = chunk_of(p.shape.grid, part.of, i);
      // The state warps wait for the producer warps before they pass the memory on, so the tokens are loaded
      // too.
      wait(space.left() + place.place, place.parity);
      read(Own(stage, 0), space.memory(place.place), chunk.start, chunk.length, [&] {
        arrive_once(space.taken() + place.place);
        wait(space.written() + stage.place, stage.parity);
      });
      arrive_once(space.empty() + stage.place);
      stage.skip(Space::kReaders, Space::kStages), place.skip(Space::kReaders, Space::kPlaces);
    }
  }

  __device__ void run_long(int reader) const {
    Turn stage, place;
    unsigned begun = 0;  // tiles of earlier chunks
    for (int64_t i = 0; i < part.of.chunks; ++i) {
      const Chunk chunk = chunk_of(p.shape.grid, part.of, i);
      const int tiles = (chunk.length + kTile - 1) / kTile;
      const int tile = static_cast<int>((reader - begun) % Space::kReaders);
      wait(space.left() + place.place, place.parity);
      if (tile < tiles) {
        const Own at(stage, tile);
        // The state warps store the tiles in order: the later wait implies the earlier ones.
        wait(space.written() + at.own.place, at.own.parity);
        read(at, space.memory(place.place), chunk.start + tile * kTile,
             min(chunk.length - tile * kTile, kTile), [] {});
      }
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

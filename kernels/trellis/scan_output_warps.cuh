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
#include "trellis/scan_storage.cuh"

namespace girih::kernels {

template <typename T, int Tile, bool Short, bool Weighted>
struct TrellisScanOutputWarp {
  using Storage = TrellisScanStorage<T, Tile>;
  using Token = typename Storage::Token;
  static constexpr int N = Tile / 8, K = Tile / 16;

  const TrellisScan& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;

  // A tile of an output warp: the stage of the chunk's tile 0, and the stage of its own tile.
  struct ReaderTile {
    PipelineState chunk_pipe, own_pipe;
    int tile;
    __device__ ReaderTile(const PipelineState& first, int tile)
        : chunk_pipe(first), own_pipe(first), tile(tile) {
      own_pipe.skip(tile, Storage::kStages);
    }
    __device__ int stage(int j) const {
      const int s = chunk_pipe.stage + j;
      return s < Storage::kStages ? s : s - Storage::kStages;
    }
  };

  // Adds the terms of the chunk's tokens to y; xs and ys are the two kinds of tiles.
  __device__ void add_intra_chunk_terms(Accumulator<N>& y, const AFragment<K>& w, const ReaderTile& at,
                                        typename Storage::TokenTile xs,
                                        typename Storage::TokenTile ys) const {
    add_intra_chunk<T>(
        y, w, at.tile, [&](int j) { return storage.token(at.stage(j), xs); },
        [&](int j) { return storage.token(at.stage(j), ys); },
        [&](int j) { return storage.scalars(at.stage(j)).gates; });
  }

  // R = f(Q A^T + ..), stored to the stage of the other block or to o. Calls then() after the product with
  // the memory.
  template <class Then>
  __device__ void compute_r(const ReaderTile& at, const typename Storage::Memory& memory, int64_t token,
                            int rows, const Then& then) const {
    const int s = at.own_pipe.stage;
    const Token tile = storage.token(s, Storage::kQR);
    AFragment<K> w;
    load_blocks(w, tile);
    Accumulator<N> y;
    fill(y, 0.f);
    add_product_transposed<T>(y, w, memory);
    then();
    add_intra_chunk_terms(y, w, at, Storage::kX, Storage::kU);
    apply_map_to_rows<T>(p.shape.f, p.shape.slots, y);
    round_to_a_fragment<T>(w, y);
    store_blocks(tile, 0, 0, w);
    __syncwarp();
    if (!has_cluster_pair(p)) {
      store_tile(tile, p.o, token, rows, p.shape.M);
      return;
    }
    // The stage is empty here only after the other block has loaded r (space.init()), so the tile of the
    // other block is free too.
    if (lane() == 0) copy_to_remote(tile.data, Token::kBytes, storage.r_full() + s, 1);
  }

  // O = R A + .., and then() as above.
  template <class Then>
  __device__ void compute_o(const ReaderTile& at, const typename Storage::Memory& memory, int64_t token,
                            int rows, const Then& then) const {
    const int s = at.own_pipe.stage;
    wait(storage.r_full() + s, at.own_pipe.phase);
    AFragment<K> r;
    load_blocks(r, storage.token(s, Storage::kQR));
    arrive_remote(storage.empty() + s, 0);
    Accumulator<N> o;
    fill(o, 0.f);
    add_product<T>(o, r, memory);
    then();
    add_intra_chunk_terms(o, r, at, Storage::kU, Storage::kX);
    // The state warps no longer needs this tile: it is ready before u is full.
    const Token tile = storage.token(s, Storage::kScaled);
    round_to_a_fragment<T>(r, o);
    store_blocks(tile, 0, 0, r);
    __syncwarp();
    store_tile(tile, p.o, token, rows, p.shape.V);
  }

  __device__ void store_tile(const Token& tile, const OutputTensor<4>& to, int64_t token, int rows,
                             int width) const {
    store_rows<1>(tile, row_of<T>(to, coord.chunked.sequence.batch, token, coord.head), to.stride[1], rows,
                  width, 0);
  }

  // Stores u, z and the fits of the tile for backward.
  __device__ void store_saved(int stage, int64_t token, int rows) const {
    const int64_t batch = coord.chunked.sequence.batch;
    const auto store_saved = [&](const OutputTensor<4>& to, typename Storage::TokenTile which) {
      if (to.data != nullptr) store_tile(storage.token(stage, which), to, token, rows, p.shape.M);
    };
    store_saved(p.u[coord.memory], Storage::kU);
    store_saved(p.z[coord.memory], Storage::kA);
    const auto& row_stats = p.row_stats[coord.memory];
    if (row_stats.data == nullptr || lane() >= rows) return;
    float* const to = row_of<float>(row_stats, batch, token + lane(), coord.head);
    *reinterpret_cast<MapStats*>(to) = storage.scalars(stage).row_stats[lane()];
    if constexpr (Weighted) {
      const WeightedMapStats weighted_stats = storage.weighted_row_stats(stage)[lane()];
      *reinterpret_cast<float4*>(to + 4) = {weighted_stats.x, weighted_stats.y, 0.f, 0.f};
    }
  }

  template <class Then>
  __device__ void process_tile(const ReaderTile& at, const typename Storage::Memory& memory, int64_t token,
                               int rows, const Then& then) const {
    if (p.o.data == nullptr) {
      then();
    } else if (coord.memory == 0) {
      compute_r(at, memory, token, rows, then);
    } else {
      compute_o(at, memory, token, rows, then);
    }
    store_saved(at.own_pipe.stage, token, rows);
  }

  __device__ void run(int output_warp) const {
    if constexpr (Short) {
      run_short(output_warp);
    } else {
      run_long(output_warp);
    }
  }

  // A chunk is one tile.
  __device__ void run_short(int output_warp) const {
    PipelineState stage, memory_pipe;
    stage.skip(output_warp, Storage::kStages), memory_pipe.skip(output_warp, Storage::kMemoryStages);
#pragma unroll 1
    for (int64_t i = output_warp; i < coord.chunked.chunks; i += Storage::kOutputWarps) {
      const Chunk chunk = chunk_of(p.shape.grid, coord.chunked, i);
      // The state warps wait for the producer warps before they pass the memory on, so the tokens are loaded
      // too.
      wait(storage.memory_full() + memory_pipe.stage, memory_pipe.phase);
      process_tile(ReaderTile(stage, 0), storage.memory(memory_pipe.stage), chunk.start, chunk.length, [&] {
        arrive_warp(storage.memory_empty() + memory_pipe.stage);
        wait(storage.u_full() + stage.stage, stage.phase);
      });
      arrive_warp(storage.empty() + stage.stage);
      stage.skip(Storage::kOutputWarps, Storage::kStages),
          memory_pipe.skip(Storage::kOutputWarps, Storage::kMemoryStages);
    }
  }

  __device__ void run_long(int output_warp) const {
    PipelineState stage, memory_pipe;
    unsigned earlier_tiles = 0;  // tiles of earlier chunks
    for (int64_t i = 0; i < coord.chunked.chunks; ++i) {
      const Chunk chunk = chunk_of(p.shape.grid, coord.chunked, i);
      const int tiles = (chunk.length + kTile - 1) / kTile;
      const int tile = static_cast<int>((output_warp - earlier_tiles) % Storage::kOutputWarps);
      wait(storage.memory_full() + memory_pipe.stage, memory_pipe.phase);
      if (tile < tiles) {
        const ReaderTile at(stage, tile);
        // The state warps store the tiles in order: the later wait implies the earlier ones.
        wait(storage.u_full() + at.own_pipe.stage, at.own_pipe.phase);
        process_tile(at, storage.memory(memory_pipe.stage), chunk.start + tile * kTile,
                     min(chunk.length - tile * kTile, kTile), [] {});
      }
      for (int j = 0; j < tiles; ++j, stage.next(Storage::kStages)) {
        wait(storage.u_full() + stage.stage, stage.phase);
        arrive_warp(storage.empty() + stage.stage);
      }
      arrive_warp(storage.memory_empty() + memory_pipe.stage);
      memory_pipe.next(Storage::kMemoryStages);
      earlier_tiles += tiles;
    }
  }
};

}  // namespace girih::kernels

// Output warps of the scan: compute the reads of the memories and store o, u and z. Tile i of the sequence,
// counted over all its chunks, belongs to warp i % kOutputWarps.
//
//     memory of keys      r_t = f(A_t q_t)    sent to the block of values; with one memory r is o
//     memory of values    o_t = A_t^T r_t
//
// All output warps release the tiles and the memory of a chunk. With HasLookahead a chunk is one tile: only
// its output warp releases these, and it multiplies by the memory before it waits for u.
#pragma once

#include "tile/cluster.h"
#include "trellis/scan_storage.cuh"

namespace girih::kernels {

template <typename T, int Width, bool HasLookahead, bool Weighted>
struct TrellisScanOutputWarp {
  using Storage = TrellisScanStorage<T, Width>;
  using StageTile = typename Storage::StageTile;
  static constexpr int N = Width / 8, K = Width / 16;

  const TrellisScan& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;

  // The tile of an output warp: its index in the chunk, its stage, and the stage of the chunk's tile 0.
  struct WarpTile {
    PipelineState chunk_pipe, pipe;
    int tile;
    __device__ WarpTile(const PipelineState& first, int tile) : chunk_pipe(first), pipe(first), tile(tile) {
      pipe.skip(tile, Storage::kStages);
    }
    __device__ int stage(int j) const {
      const int s = chunk_pipe.stage + j;
      return s < Storage::kStages ? s : s - Storage::kStages;
    }
  };

  // Calls decay_and_add_intra_chunk() with dot_i and sum_i in these tensors of the stages.
  __device__ void complete_read(Accumulator<N>& y, const AFragment<K>& w, const WarpTile& warp_tile,
                                typename Storage::StageTensor dot_tensor,
                                typename Storage::StageTensor sum_tensor) const {
    decay_and_add_intra_chunk<T>(
        y, w, warp_tile.tile, [&](int j) { return storage.stage_tile(warp_tile.stage(j), dot_tensor); },
        [&](int j) { return storage.stage_tile(warp_tile.stage(j), sum_tensor); },
        [&](int j) { return storage.scalars(warp_tile.stage(j)).gates; });
  }

  // Computes R = f(Y), y_t = A_t q_t, and stores R to the stage of the other block or to o. Calls
  // after_memory_product() after the last read of the memory.
  template <class Callback>
  __device__ void compute_r(const WarpTile& warp_tile, const typename Storage::Memory& memory, int64_t token,
                            int rows, const Callback& after_memory_product) const {
    const int s = warp_tile.pipe.stage;
    const StageTile tile = storage.stage_tile(s, Storage::kQR);
    AFragment<K> w;
    load_blocks(w, tile);
    Accumulator<N> y;
    fill(y, 0.f);
    add_product_transposed<T>(y, w, memory);
    after_memory_product();
    complete_read(y, w, warp_tile, Storage::kX, Storage::kU);
    apply_map_to_rows<T>(p.shape.f, p.shape.slots, y);
    round_to_a_fragment<T>(w, y);
    store_blocks(tile, 0, 0, w);
    __syncwarp();
    if (!has_cluster_pair(p)) {
      store_tile(tile, p.o, token, rows, p.shape.M);
      return;
    }
    // The stage of this block was empty only after the other block had loaded its previous r (init()), so the
    // tile of the other block is free.
    if (lane() == 0)
      copy_to_remote(tile.data, StageTile::kBytes, storage.barriers().r_full.at(s), kValueMemory);
  }

  // Computes o_t = A_t^T r_t. Calls after_memory_product() after the last read of the memory.
  template <class Callback>
  __device__ void compute_o(const WarpTile& warp_tile, const typename Storage::Memory& memory, int64_t token,
                            int rows, const Callback& after_memory_product) const {
    const int s = warp_tile.pipe.stage;
    storage.barriers().r_full.wait(warp_tile.pipe);
    AFragment<K> r;
    load_blocks(r, storage.stage_tile(s, Storage::kQR));
    storage.barriers().empty.arrive_remote(s, kKeyMemory);
    Accumulator<N> o;
    fill(o, 0.f);
    add_product<T>(o, r, memory);
    after_memory_product();
    complete_read(o, r, warp_tile, Storage::kU, Storage::kX);
    // o replaces X~. The state warps and, for the scores of the next tile, the producer warps have read X~
    // before u is full.
    const StageTile tile = storage.stage_tile(s, Storage::kScaledX);
    round_to_a_fragment<T>(r, o);
    store_blocks(tile, 0, 0, r);
    __syncwarp();
    store_tile(tile, p.o, token, rows, p.shape.V);
  }

  __device__ void store_tile(const StageTile& tile, const OutputTensor<4>& to, int64_t token, int rows,
                             int width) const {
    store_rows<1>(tile, row_of<T>(to, coord.chunked.sequence.batch, token, coord.head), to.stride[1], rows,
                  width, 0);
  }

  // Stores u, z and the row statistics of the tile for backward.
  __device__ void store_saved(int stage, int64_t token, int rows) const {
    const int64_t batch = coord.chunked.sequence.batch;
    const auto store_tensor = [&](const OutputTensor<4>& to, typename Storage::StageTensor tensor) {
      if (to.data != nullptr) store_tile(storage.stage_tile(stage, tensor), to, token, rows, p.shape.M);
    };
    store_tensor(p.u[coord.memory], Storage::kU);
    store_tensor(p.z[coord.memory], Storage::kTargets);
    const auto& row_stats = p.row_stats[coord.memory];
    if (row_stats.data == nullptr || lane() >= rows) return;
    float* const to = row_of<float>(row_stats, batch, token + lane(), coord.head);
    *reinterpret_cast<MapStats*>(to) = storage.scalars(stage).row_stats[lane()];
    if constexpr (Weighted) {
      const WeightedMapStats weighted_stats = storage.weighted_row_stats(stage)[lane()];
      *reinterpret_cast<float4*>(to + 4) = {weighted_stats.x, weighted_stats.y, 0.f, 0.f};
    }
  }

  template <class Callback>
  __device__ void process_tile(const WarpTile& warp_tile, const typename Storage::Memory& memory,
                               int64_t token, int rows, const Callback& after_memory_product) const {
    if (p.o.data == nullptr) {
      after_memory_product();
    } else if (coord.memory == kKeyMemory) {
      compute_r(warp_tile, memory, token, rows, after_memory_product);
    } else {
      compute_o(warp_tile, memory, token, rows, after_memory_product);
    }
    store_saved(warp_tile.pipe.stage, token, rows);
  }

  __device__ void run(int output_warp) const {
    if constexpr (HasLookahead) {
      run_single_tile_chunks(output_warp);
    } else {
      run_multi_tile_chunks(output_warp);
    }
  }

  __device__ void run_single_tile_chunks(int output_warp) const {
    PipelineState token_pipe, memory_pipe;
    token_pipe.skip(output_warp, Storage::kStages), memory_pipe.skip(output_warp, Storage::kMemoryStages);
#pragma unroll 1
    for (int64_t i = output_warp; i < coord.chunked.chunks; i += Storage::kOutputWarps) {
      const Chunk chunk = chunk_of(p.shape.grid, coord.chunked, i);
      // The state warps wait for the producer warps before they pass the memory on, so the tokens are loaded
      // too.
      storage.barriers().memory_full.wait(memory_pipe);
      process_tile(WarpTile(token_pipe, 0), storage.memory(memory_pipe.stage), chunk.start, chunk.length,
                   [&] {
                     storage.barriers().memory_empty.arrive_warp(memory_pipe.stage);
                     storage.barriers().u_full.wait(token_pipe);
                   });
      storage.barriers().empty.arrive_warp(token_pipe.stage);
      token_pipe.skip(Storage::kOutputWarps, Storage::kStages),
          memory_pipe.skip(Storage::kOutputWarps, Storage::kMemoryStages);
    }
  }

  __device__ void run_multi_tile_chunks(int output_warp) const {
    PipelineState token_pipe, memory_pipe;
    unsigned earlier_tiles = 0;  // tiles of earlier chunks
    for (int64_t i = 0; i < coord.chunked.chunks; ++i) {
      const Chunk chunk = chunk_of(p.shape.grid, coord.chunked, i);
      const int tiles = (chunk.length + kTokenTile - 1) / kTokenTile;
      // The unsigned difference may wrap: kOutputWarps divides 2^32.
      const int tile = static_cast<int>((output_warp - earlier_tiles) % Storage::kOutputWarps);
      storage.barriers().memory_full.wait(memory_pipe);
      if (tile < tiles) {
        const WarpTile warp_tile(token_pipe, tile);
        // The state warps store the tiles in order: the later wait implies the earlier ones.
        storage.barriers().u_full.wait(warp_tile.pipe);
        process_tile(warp_tile, storage.memory(memory_pipe.stage), chunk.start + tile * kTokenTile,
                     min(chunk.length - tile * kTokenTile, kTokenTile), [] {});
      }
      for (int j = 0; j < tiles; ++j, token_pipe.next(Storage::kStages)) {
        storage.barriers().u_full.wait(token_pipe);
        storage.barriers().empty.arrive_warp(token_pipe.stage);
      }
      storage.barriers().memory_empty.arrive_warp(memory_pipe.stage);
      memory_pipe.next(Storage::kMemoryStages);
      earlier_tiles += tiles;
    }
  }
};

}  // namespace girih::kernels

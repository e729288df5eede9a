// Producer warps of the reverse scan, which take the tiles round-robin, and the warp that loads memories.
#pragma once

#include "trellis/reverse_storage.cuh"

namespace girih::kernels {

// HasOneTile: a chunk has at most one tile.
template <typename T, int Width, bool HasOneTile, bool Weighted>
struct TrellisReverseProducerWarp {
  using Storage = TrellisReverseStorage<T, Width>;
  using StageTile = typename Storage::StageTile;
  using StageTensor = typename Storage::StageTensor;
  static constexpr int K = Width / 16, kPacks = Width / 8, kPacksPerLane = kTokenTile * kPacks / 32;

  const TrellisReverse& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;

  // A tile in flight: its stage, the number of later tiles of the chunk (these were loaded earlier), the
  // tokens of the last tile of the chunk, and the TileFlags.
  struct PendingTile {
    PipelineState pipe;
    int later_tiles, rows_of_last, tile_flags;
    bool is_valid = false;
  };

  __device__ void load_tile(const Chunk& chunk, int tile, int stage) const {
    const int rows = rows_in(chunk, tile);
    const int64_t batch = coord.chunked.sequence.batch, token = chunk.start + tile * kTokenTile;
#pragma unroll 1
    for (int i = 0; i < Storage::kSources; ++i) {
      const auto& source = storage.sources()[i];
      source.load(storage.stage_tile(stage, static_cast<StageTensor>(source.tile)), token, rows);
    }
    auto& scalars = storage.scalars(stage);
    load_gates(scalars.gates, p.shape, p.gates, batch, token, rows, coord.head);
    if (lane() < kTokenTile) {
      const bool has = lane() < rows;
      const float* const row_stats =
          row_of<float>(p.row_stats[coord.memory], batch, token + (has ? lane() : 0), coord.head);
      copy_async(shared_address(scalars.row_stats + lane()), row_stats, has);
      if (Weighted)
        copy_async(shared_address(storage.weighted_row_stats(stage) + lane()), row_stats + 4, has);
    }
    commit_copies();
  }

  // Computes e^{L_t} l_t and, with E_ti = e^{L_t - L_i}, the term of du from the reads in the chunk
  //     intra_i = -gamma_i sum over t >= i of E_ti (w_t.x_i) l_t
  __device__ void transform_tile(const PendingTile& tile) const {
    const int stage = tile.pipe.stage;
    auto& scalars = storage.scalars(stage);
    const StageTile x = storage.stage_tile(stage, Storage::kX), l = storage.stage_tile(stage, Storage::kL),
                    scaled = storage.stage_tile(stage, Storage::kScaledL),
                    intra_du = storage.stage_tile(stage, Storage::kIntraDu);
#pragma unroll 1
    for (int i = 0; i < kPacksPerLane; ++i) {
      const int index = i * 32 + lane(), row = index / kPacks, col = index % kPacks * 8;
      Pack<8> pack = load<8>(&l.at(row, col));
      const float scale = exp2_fast(scalars.gates[row].log_decay);
#pragma unroll
      for (int e = 0; e < 8; ++e) pack.at[e] *= scale;
      store<8>(&scaled.at(row, col), pack);
    }
    if (lane() < kTokenTile) {
      const TokenGate gate = scalars.gates[lane()];
      scalars.x_scale[lane()] = -gate.gamma * exp2_fast(gate.log_decay_to_end);
      if (lane() == 0)
        scalars.decay = exp2_fast(gate.log_decay + gate.log_decay_to_end),
        scalars.tile_flags = tile.tile_flags;
    }
    const TrellisLogDecays L(scalars.gates);
    const float2 gamma{scalars.gates[lane_row()].gamma, scalars.gates[lane_row() + 8].gamma};
    AFragment<1> scores[Storage::kOutputWarps];
#pragma unroll
    for (int j = 0; j < Storage::kOutputWarps; ++j) {
      if (j > tile.later_tiles) break;
      // Other producer warps load the later tiles of the chunk.
      const int other = earlier_stage(stage, j);
      if (j > 0) storage.barriers().full.wait({other, tile.pipe.phase ^ (other > stage ? 1u : 0u)});
      Accumulator<2> s;
      fill(s, 0.f);
      add_tile_product_transposed<K>(s, x, 0, storage.stage_tile(other, Storage::kW), 0);
      apply_token_decay_transposed(s, L, storage.scalars(other).gates, j == 0,
                                   j == tile.later_tiles ? tile.rows_of_last : kTokenTile);
      scale_rows(s, {-gamma.x, -gamma.y});
      round_to_a_fragment<T>(scores[j], s);
    }
#pragma unroll 1
    for (int n = 0; n < Width / 8; n += 4) {
      Accumulator<4> sums;
      fill(sums, 0.f);
#pragma unroll
      for (int j = 0; j < Storage::kOutputWarps; ++j) {
        if (j > tile.later_tiles) break;
        add_product<T>(sums, scores[j].at[0], storage.stage_tile(earlier_stage(stage, j), Storage::kL), 0,
                       8 * n);
      }
      AFragment<2> rounded;
      round_to_a_fragment<T>(rounded, sums);
      store_blocks(intra_du, 0, 8 * n, rounded);
    }
    storage.barriers().full.arrive_warp(stage);
  }

  // The stage of the tile that was loaded `tiles` tiles earlier.
  __device__ static int earlier_stage(int stage, int tiles) {
    return stage >= tiles ? stage - tiles : stage - tiles + Storage::kStages;
  }

  // A producer warp transforms a tile when it comes to its next tile, so that the copies have time. Starting
  // the next copies earlier would wait for a stage of the output warps while the state warps wait for this
  // tile.
  __device__ void run(int producer) const {
    PipelineState token_pipe;
    PendingTile pending;
    if constexpr (HasOneTile) {
      token_pipe.skip(producer, Storage::kStages);
      for (int64_t i = coord.chunked.chunks - 1 - producer; i >= 0; i -= Storage::kProducerWarps) {
        process_tile(pending, token_pipe, chunk_of(p.shape.grid, coord.chunked, i), i, 0, 1);
        token_pipe.skip(Storage::kProducerWarps, Storage::kStages);
      }
    } else {
      int tiles_until_own = producer;
      for (int64_t i = coord.chunked.chunks - 1; i >= 0; --i) {
        const Chunk chunk = chunk_of(p.shape.grid, coord.chunked, i);
        const int tiles = tiles_in(chunk);
        for (int tile = tiles - 1; tile >= 0; --tile, token_pipe.next(Storage::kStages)) {
          if (tiles_until_own-- > 0) continue;
          tiles_until_own = Storage::kProducerWarps - 1;
          process_tile(pending, token_pipe, chunk, i, tile, tiles);
        }
      }
    }
    finish_pending(pending);
  }

 private:
  __device__ void process_tile(PendingTile& pending, const PipelineState& token_pipe, const Chunk& chunk,
                               int64_t chunk_index, int tile, int tiles) const {
    finish_pending(pending);
    storage.barriers().empty.wait(token_pipe);
    load_tile(chunk, tile, token_pipe.stage);
    pending = {token_pipe, tiles - 1 - tile, rows_in(chunk, tiles - 1), tile_flags(chunk_index, tile, tiles),
               true};
  }
  __device__ int tile_flags(int64_t chunk, int tile, int tiles) const {
    return (tile == tiles - 1 ? Storage::kLastTileOfChunk : 0) |
           (tile == 0 ? Storage::kFirstTileOfChunk : 0) |
           (is_resumed(p.chunk_start[coord.memory], chunk) ? Storage::kResumedChunk : 0) |
           (chunk == 0 && tile == 0 ? Storage::kFirstTileOfSequence : 0);
  }
  __device__ void finish_pending(const PendingTile& pending) const {
    if (!pending.is_valid) return;
    wait_copies<0>();
    __syncwarp();
    transform_tile(pending);
  }
};

// Loads the memory before every chunk. For a chunk that began in an earlier call, loads A' and then A. Called
// by one warp.
template <typename T, int Width>
__device__ inline void load_memories(const TrellisReverse& p, const TrellisBlockCoord& coord,
                                     const TrellisReverseStorage<T, Width>& storage) {
  using Storage = TrellisReverseStorage<T, Width>;
  const int memory = coord.memory;
  const T* stored = static_cast<const T*>(p.memories[memory]);
  PipelineState memory_pipe;
  const auto publish_memory = [&] {
    storage.barriers().memory_full.arrive_after_copies(memory_pipe.stage);
    storage.barriers().memory_full.arrive_warp(memory_pipe.stage);
    memory_pipe.next(Storage::kMemoryStages);
  };
  for (int64_t i = coord.chunked.chunks - 1; i >= 0; --i) {
    if (is_resumed(p.chunk_start[memory], i)) {
      storage.barriers().memory_empty.wait(memory_pipe);
      const auto to = storage.memory(memory_pipe.stage);
      for (int j = lane(); j < Width * Width; j += 32) to.at(j / Width, j % Width) = from_float<T>(0.f);
      __syncwarp();
      const auto& chunk_start = p.chunk_start[memory];
      const int64_t base = offset_of(chunk_start, coord.sequence, coord.head);
      const int width = p.shape.width(memory);
      for (int j = lane(); j < p.shape.slots * width; j += 32) {
        const int m = j / width, x = j % width;
        to.at(m, x) = from_float<T>(static_cast<const float*>(
            chunk_start.data)[base + m * chunk_start.stride[2] + x * chunk_start.stride[3]]);
      }
      publish_memory();
    }
    storage.barriers().memory_empty.wait(memory_pipe);
    T* to = storage.memory(memory_pipe.stage).data;
    const T* from = stored + stored_memory_offset<Width>(p.shape, coord.chunked.first + i, coord.head);
#pragma unroll
    for (int j = 0; j < Width * Width / 256; ++j) {
      copy_async(shared_address(to + 256 * j + 8 * lane()), from + 256 * j + 8 * lane(), true);
    }
    publish_memory();
  }
}

}  // namespace girih::kernels

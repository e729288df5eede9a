// Producer warps of the scan, which take the tiles round-robin, and the warp that stores memories.
#pragma once

#include "trellis/scan_storage.cuh"

namespace girih::kernels {

// Iterates over the tiles of a sequence, chunk by chunk. HasLookahead: a chunk is one tile.
template <bool HasLookahead>
struct TrellisTileIterator {
  const TrellisShape& shape;
  const ChunkedSequence& chunked;
  int64_t chunk_index = 0;
  int tile_start = 0;  // offset of the tile in the chunk, in tokens
  Chunk chunk;

  __device__ TrellisTileIterator(const TrellisShape& shape, const ChunkedSequence& chunked)
      : shape(shape), chunked(chunked) {
    load_chunk();
  }
  __device__ bool is_done() const { return chunk_index >= chunked.chunks; }
  __device__ int rows() const { return min(chunk.length - tile_start, kTokenTile); }
  template <class Storage>
  __device__ int tile_flags(bool has_chunk_start) const {
    const bool last = tile_start + kTokenTile >= chunk.length;
    return (tile_start == 0 ? Storage::kFirstTileOfChunk : 0) |
           (last && chunk_index + 1 == chunked.chunks ? Storage::kLastTileOfSequence : 0) |
           (chunk.is_complete ? 0 : Storage::kIncompleteChunk) |
           (has_chunk_start && chunk_index == 0 ? Storage::kResumedChunk : 0);
  }
  __device__ void skip(int tiles) {
    if constexpr (HasLookahead) {
      chunk_index += tiles;
      load_chunk();
    } else {
#pragma unroll 1
      for (; tiles > 0 && !is_done(); --tiles) next();
    }
  }

 private:
  __device__ void next() {
    tile_start += kTokenTile;
    if (tile_start < chunk.length) return;
    tile_start = 0, ++chunk_index;
    load_chunk();
  }
  __device__ void load_chunk() {
    if (!is_done()) chunk = chunk_of(shape.grid, chunked, chunk_index);
  }
};

// HasLookahead: a chunk is one tile, and the state warps compute one chunk ahead.
template <typename T, int Width, bool HasLookahead>
struct TrellisScanProducerWarp {
  using Storage = TrellisScanStorage<T, Width>;
  using StageTile = typename Storage::StageTile;
  using StageTensor = typename Storage::StageTensor;
  static constexpr int kPacks = Width / 8, kPacksPerLane = kTokenTile * kPacks / 32;

  const TrellisScan& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;

  // Starts the copies of a tile to its stage.
  __device__ void load_tile(const TrellisTileIterator<HasLookahead>& tile, int stage) const {
    const int64_t batch = coord.chunked.sequence.batch, token = tile.chunk.start + tile.tile_start;
    const int rows = tile.rows(), sources = coord.memory == kKeyMemory && p.o.data != nullptr ? 3 : 2;
#pragma unroll 1
    for (int i = 0; i < sources; ++i) {
      const auto& source = storage.sources()[i];
      source.load(storage.stage_tile(stage, static_cast<StageTensor>(source.tile)), token, rows);
    }
    load_gates(storage.scalars(stage).gates, p.shape, p.gates, batch, token, rows, coord.head);
    commit_copies();
  }

  // Computes X X~^T with X~ of the previous tile. Waits until the stage of that tile is full.
  __device__ void compute_scores(const PipelineState& token_pipe) const {
    const PipelineState previous = token_pipe.previous(Storage::kStages);
    AFragment<Width / 16> x;
    Accumulator<2> scores;
    load_blocks(x, storage.stage_tile(token_pipe.stage, Storage::kX));
    fill(scores, 0.f);
    storage.barriers().full.wait(previous);
    add_product_transposed<T>(scores, x, storage.stage_tile(previous.stage, Storage::kScaledX));
    AFragment<1> rounded;
    round_to_a_fragment<T>(rounded, scores);
    const auto& a = rounded.at[0];
    storage.scores(token_pipe.stage) = {a[0], a[1], a[2], a[3]};
  }

  // Transforms a tile whose copies have arrived: scales x, and sums a over the slots.
  __device__ void transform_tile(const PipelineState& token_pipe, int tile_flags,
                                 bool has_previous_tile) const {
    const int stage = token_pipe.stage;
    auto& scalars = storage.scalars(stage);
    const StageTile x = storage.stage_tile(stage, Storage::kX),
                    scaled = storage.stage_tile(stage, Storage::kScaledX),
                    a = storage.stage_tile(stage, Storage::kTargets);
#pragma unroll 2
    for (int i = 0; i < kPacksPerLane; ++i) {
      const int index = i * 32 + lane(), row = index / kPacks, col = index % kPacks * 8;
      Pack<8> pack = load<8>(&x.at(row, col));
      const TokenGate gate = scalars.gates[row];
      const float scale = -gate.gamma * exp2_fast(gate.log_decay_to_end);
#pragma unroll
      for (int e = 0; e < 8; ++e) pack.at[e] *= scale;
      store<8>(&scaled.at(row, col), pack);
    }
    // Two lanes have a row of a.
    float sum = 0.f;
#pragma unroll 2
    for (int i = 0; i < kPacks / 2; ++i) {
      const Pack<8> pack = load<8>(&a.at(lane() / 2, (2 * i + lane() % 2) * 8));
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += pack.at[e];
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (lane() % 2 == 0) scalars.rows[lane() / 2 % 8].sum_a[lane() / 16] = sum;
    // e^{L_C}, from the gate of the tile's token 0.
    if (lane() < 8)
      scalars.rows[lane()].decay = exp2_fast(scalars.gates[0].log_decay + scalars.gates[0].log_decay_to_end);
    if (lane() == 0) scalars.tile_flags = tile_flags;
    if (HasLookahead && has_previous_tile) compute_scores(token_pipe);
    storage.barriers().full.arrive_warp(stage);
  }

  // The copies of a tile are in flight while the warp transforms the tile that it loaded before, the pending
  // tile.
  __device__ void run(int producer) const {
    const bool has_chunk_start = p.chunk_start[coord.memory].data != nullptr;
    PipelineState token_pipe, pending_pipe;
    int tile_flags = 0;  // of the pending tile
    bool has_pending = false,
         has_previous_tile = false;  // whether the pending tile has a previous tile in the sequence
    TrellisTileIterator<HasLookahead> tile(p.shape, coord.chunked);
    tile.skip(producer), token_pipe.skip(producer, Storage::kStages);
    for (; !tile.is_done();
         tile.skip(Storage::kProducerWarps), token_pipe.skip(Storage::kProducerWarps, Storage::kStages)) {
      storage.barriers().empty.wait(token_pipe);
      load_tile(tile, token_pipe.stage);
      if (has_pending) {
        wait_copies<1>();
        __syncwarp();
        transform_tile(pending_pipe, tile_flags, has_previous_tile);
      }
      pending_pipe = token_pipe, tile_flags = tile.template tile_flags<Storage>(has_chunk_start),
      has_pending = true;
      has_previous_tile = tile.chunk_index > 0 || tile.tile_start > 0;
    }
    if (!has_pending) return;
    wait_copies<0>();
    __syncwarp();
    transform_tile(pending_pipe, tile_flags, has_previous_tile);
  }
};

// Stores the memory before every chunk; called by one warp.
template <typename T, int Width>
__device__ inline void store_memories(const TrellisScan& p, const TrellisBlockCoord& coord,
                                      const TrellisScanStorage<T, Width>& storage) {
  if (p.memories[coord.memory] == nullptr) return;
  T* to = static_cast<T*>(p.memories[coord.memory]);
  PipelineState memory_pipe;
  for (int64_t i = 0; i < coord.chunked.chunks; ++i) {
    storage.barriers().memory_full.wait(memory_pipe);
    store_bytes<Width * Width* static_cast<int>(sizeof(T))>(
        to + stored_memory_offset<Width>(p.shape, coord.chunked.first + i, coord.head),
        storage.memory(memory_pipe.stage).data);
    storage.barriers().memory_empty.arrive_warp(memory_pipe.stage);
    memory_pipe.next(TrellisScanStorage<T, Width>::kMemoryStages);
  }
}

}  // namespace girih::kernels

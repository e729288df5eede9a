// Producer warps of the scan, which take the tiles round-robin, and the warp that stores memories.
#pragma once

#include "trellis/scan_storage.cuh"

namespace girih::kernels {

// Iterates over the chunks of a sequence and their tiles. Short: a chunk is one tile.
template <bool Short>
struct TrellisTileIterator {
  const TrellisShape& shape;
  const ChunkedSequence& of;
  int64_t chunk_index = 0;
  int tile_start = 0;  // token of the chunk at which the tile starts
  Chunk chunk;

  __device__ TrellisTileIterator(const TrellisShape& shape, const ChunkedSequence& of)
      : shape(shape), of(of) {
    load_chunk();
  }
  __device__ bool is_done() const { return chunk_index >= of.chunks; }
  __device__ int rows() const { return min(chunk.length - tile_start, kTile); }
  template <class Storage>
  __device__ int tile_flags(bool resumed) const {
    const bool last = tile_start + kTile >= chunk.length;
    return (tile_start == 0 ? Storage::kChunkStart : 0) |
           (last && chunk_index + 1 == of.chunks ? Storage::kSequenceEnd : 0) |
           (chunk.is_complete ? 0 : Storage::kIncompleteChunk) |
           (resumed && chunk_index == 0 ? Storage::kResumedChunk : 0);
  }
  __device__ void skip(int tiles) {
    if constexpr (Short) {
      chunk_index += tiles;
      load_chunk();
    } else {
#pragma unroll 1
      for (; tiles > 0 && !is_done(); --tiles) next();
    }
  }

 private:
  __device__ void next() {
    tile_start += kTile;
    if (tile_start < chunk.length) return;
    tile_start = 0, ++chunk_index;
    load_chunk();
  }
  __device__ void load_chunk() {
    if (!is_done()) chunk = chunk_of(shape.grid, of, chunk_index);
  }
};

// Short: a chunk is one tile, and the state warps compute one chunk ahead.
template <typename T, int Tile, bool Short>
struct TrellisScanProducerWarp {
  using Storage = TrellisScanStorage<T, Tile>;
  using Token = typename Storage::Token;
  using TokenTile = typename Storage::TokenTile;
  static constexpr int kPacks = Tile / 8, kPacksPerLane = kTile * kPacks / 32;

  const TrellisScan& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;

  // Starts the copies of a tile to its stage.
  __device__ void load_tile(const TrellisTileIterator<Short>& at, int stage) const {
    const int64_t batch = coord.chunked.sequence.batch, token = at.chunk.start + at.tile_start;
    const int rows = at.rows(), sources = coord.memory == 0 && p.o.data != nullptr ? 3 : 2;
#pragma unroll 1
    for (int i = 0; i < sources; ++i) {
      const auto& source = storage.sources()[i];
      source.load(storage.token(stage, static_cast<TokenTile>(source.tile)), token, rows);
    }
    load_gates(storage.scalars(stage).gates, p.shape, p.gates, batch, token, rows, coord.head);
    commit_copies();
  }

  // Computes X X~^T. Waits until the stage before, which has X~, is full.
  __device__ void compute_scores(const PipelineState& token_pipe) const {
    const int before = (token_pipe.stage == 0 ? Storage::kStages : token_pipe.stage) - 1;
    AFragment<Tile / 16> x;
    Accumulator<2> scores;
    load_blocks(x, storage.token(token_pipe.stage, Storage::kX));
    fill(scores, 0.f);
    wait(storage.full() + before, token_pipe.stage == 0 ? token_pipe.phase ^ 1 : token_pipe.phase);
    add_product_transposed<T>(scores, x, storage.token(before, Storage::kScaled));
    AFragment<1> rounded;
    round_to_a_fragment<T>(rounded, scores);
    const auto& at = rounded.at[0];
    storage.scores(token_pipe.stage) = {at[0], at[1], at[2], at[3]};
  }

  // Transforms a tile whose copies have arrived: scales x, and sums a over the slots.
  __device__ void transform_tile(const PipelineState& token_pipe, int tile_flags, bool has_previous) const {
    const int stage = token_pipe.stage;
    auto& scalars = storage.scalars(stage);
    const Token x = storage.token(stage, Storage::kX), scaled = storage.token(stage, Storage::kScaled),
                a = storage.token(stage, Storage::kA);
#pragma unroll 2
    for (int i = 0; i < kPacksPerLane; ++i) {
      const int at = i * 32 + lane(), row = at / kPacks, col = at % kPacks * 8;
      Pack<8> pack = load<8>(&x.at(row, col));
      const TokenGate gate = scalars.gates[row];
      const float weight = -gate.gamma * exp2_fast(gate.log_decay_to_end);
#pragma unroll
      for (int e = 0; e < 8; ++e) pack.at[e] *= weight;
      store<8>(&scaled.at(row, col), pack);
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
    if (lane() % 2 == 0) scalars.rows[lane() / 2 % 8].sum_a[lane() / 16] = sum;
    // e^{L_C}, from the gate of the tile's token 0.
    if (lane() < 8)
      scalars.rows[lane()].decay = exp2_fast(scalars.gates[0].log_decay + scalars.gates[0].log_decay_to_end);
    if (lane() == 0) scalars.tile_flags = tile_flags;
    if (Short && has_previous) compute_scores(token_pipe);
    arrive_warp(storage.full() + stage);
  }

  // The copies of a tile are in flight while the warp transforms its tile before.
  __device__ void run(int producer) const {
    const bool resumed = p.chunk_start[coord.memory].data != nullptr;
    PipelineState token_pipe, before;
    int tile_flags = 0;
    bool has_pending = false,
         has_previous = false;  // a tile of this warp is in flight; another tile precedes it
    TrellisTileIterator<Short> at(p.shape, coord.chunked);
    at.skip(producer), token_pipe.skip(producer, Storage::kStages);
    for (; !at.is_done();
         at.skip(Storage::kProducerWarps), token_pipe.skip(Storage::kProducerWarps, Storage::kStages)) {
      wait(storage.empty() + token_pipe.stage, token_pipe.phase ^ 1);
      load_tile(at, token_pipe.stage);
      if (has_pending) {
        wait_copies<1>();
        __syncwarp();
        transform_tile(before, tile_flags, has_previous);
      }
      before = token_pipe, tile_flags = at.template tile_flags<Storage>(resumed), has_pending = true;
      has_previous = at.chunk_index > 0 || at.tile_start > 0;
    }
    if (!has_pending) return;
    wait_copies<0>();
    __syncwarp();
    transform_tile(before, tile_flags, has_previous);
  }
};

template <typename T, int Tile>
__device__ inline void store_memories(const TrellisScan& p, const TrellisBlockCoord& coord,
                                      const TrellisScanStorage<T, Tile>& storage) {
  if (p.memories[coord.memory] == nullptr) return;
  T* to = static_cast<T*>(p.memories[coord.memory]);
  PipelineState token_pipe;
  for (int64_t i = 0; i < coord.chunked.chunks; ++i) {
    wait(storage.memory_full() + token_pipe.stage, token_pipe.phase);
    store_bytes<Tile * Tile* static_cast<int>(sizeof(T))>(
        to + stored_memory_offset<T, Tile>(p.shape, coord.chunked.first + i, coord.head),
        storage.memory(token_pipe.stage).data);
    arrive_warp(storage.memory_empty() + token_pipe.stage);
    token_pipe.next(TrellisScanStorage<T, Tile>::kMemoryStages);
  }
}

}  // namespace girih::kernels

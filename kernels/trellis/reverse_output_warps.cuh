// Output warps of the reverse scan: gradients of the tokens of a chunk. For either memory, with A the memory
// before the chunk, G the gradient of the memory after it, and E_ti = e^{L_t - L_i},
//
//     c_i  = e^{L_C - L_i} (u_i G) + sum over t >= i of E_ti (u_i.l_t) w_t
//     dx_i = -gamma_i c_i + dz_i A'        dgamma_i = -x_i.c_i        da_i = -J du_i
//
// The gate of a token decays everything that precedes the token, in all reads from the token on. So dg_j is
// the sum of
//     e^{L_t} l_t^T A w_t                                 t >= j
//     pair_ti = -gamma_i E_ti (w_t.x_i) (l_t.u_i)         i < j <= t
//     end_i   = -gamma_i e^{L_C - L_i} x_i.(u_i G)        i < j
//     e^{L_C} <G, A>
//
// gates.cu sums dL from the end of the chunk: dg_j is the sum of dL_t over t >= j. So pair_ti is added to
// dL_t and the same value is subtracted from dL_i, end_i is added to dL at the end of the chunk and
// subtracted from dL_i: for j <= i the two cancel exactly. Tile i of the sequence, counted from the end over
// all chunks, belongs to warp i % kOutputWarps.
#pragma once

#include "tile/row_store.h"
#include "trellis/reverse_storage.cuh"

namespace girih::kernels {

// HasOneTile: a chunk has at most one tile.
template <typename T, int Width, bool HasOneTile>
struct TrellisReverseOutputWarp {
  using Storage = TrellisReverseStorage<T, Width>;
  using StageTile = typename Storage::StageTile;
  static constexpr int K = Width / 16;

  const TrellisReverse& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;

  // The tile of an output warp: its chunk, the stage of the chunk's last tile (chunk_pipe), the stage of the
  // tile (pipe), the index of the tile in the chunk, and the number of tiles of the chunk.
  struct WarpTile {
    Chunk chunk;
    PipelineState chunk_pipe, pipe;
    int tile, tiles;
    __device__ WarpTile(const Chunk& chunk, const PipelineState& chunk_pipe, int tile, int tiles)
        : chunk(chunk), chunk_pipe(chunk_pipe), pipe(chunk_pipe), tile(tile), tiles(tiles) {
      pipe.skip(tiles - 1 - tile, Storage::kStages);
    }
    // Stage of tile j; tiles are loaded from the last one on.
    __device__ int stage(int j) const {
      const int s = chunk_pipe.stage + tiles - 1 - j;
      return s < Storage::kStages ? s : s - Storage::kStages;
    }
    __device__ int rows(int j) const { return rows_in(chunk, j); }
    __device__ int64_t token(int j) const { return chunk.start + j * kTokenTile; }
  };

  // Calls f(col) for blocks of 16 columns. A loop, to save instruction cache (row_source.h).
  template <class F>
  __device__ static void for_columns(const F& f) {
#pragma unroll 1
    for (int col = 0; col < Width; col += 16) f(col);
  }
  // Adds the lane's terms of the dot products of its two rows.
  __device__ static void add_dots(float2& dot, const Accumulator<2>& x, const Accumulator<2>& y) {
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
  __device__ static float2 sum_over_quad(const float2& dot) {
    return {sum_over_row(dot.x), sum_over_row(dot.y)};
  }

  // The lane's term of <G, A>, the trace of G A^T. The output warps of the chunk take blocks of 16 slots
  // round-robin.
  __device__ float dot_states(const WarpTile& warp_tile, const typename Storage::Memory& G,
                              const typename Storage::Memory& A) const {
    float sum = 0.f;
    for (int m = warp_tile.tile * 16; m < p.shape.M; m += 16 * warp_tile.tiles) {
      Accumulator<2> block;
      fill(block, 0.f);
      add_tile_product_transposed<K>(block, G, m, A, m);
      // The lane has rows lane_row() and lane_row() + 8 of columns 8 n + lane_col() and 8 n + lane_col() + 1.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (lane_col() + i == lane_row()) sum += block.at[0][i] + block.at[1][2 + i];
      }
    }
    return sum;
  }

  // Index of a token in [B, T, H].
  __device__ int64_t token_index(const WarpTile& warp_tile, int j, int row) const {
    const TrellisShape& shape = p.shape;
    return (coord.chunked.sequence.batch * shape.grid.tokens.tokens + warp_tile.token(j) + row) *
               shape.heads +
           coord.head;
  }
  __device__ int64_t token_count() const {
    return p.shape.grid.tokens.batch * p.shape.grid.tokens.tokens * p.shape.heads;
  }

  // pair_ti for i in the warp's tile and t in tile j, from the scores E_ti (u_i.l_t): subtracts the sums over
  // t from dL_i, and stores the sums over i in the stage's scalars.
  __device__ void add_gate_pairs(const WarpTile& warp_tile, const Accumulator<2>& decayed_scores, int j,
                                 float2 gamma, float2& dL) const {
    const StageTile x = storage.stage_tile(warp_tile.pipe.stage, Storage::kX),
                    w = storage.stage_tile(warp_tile.stage(j), Storage::kW);
    Accumulator<2> pair;
    fill(pair, 0.f);
    add_tile_product_transposed<K>(pair, x, 0, w, 0);
    float subtracted[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int t = 8 * n + lane_col() + (e & 1), i = lane_row() + (e >> 1) * 8;
        const float value = j > warp_tile.tile || i < t
                                ? -(e < 2 ? gamma.x : gamma.y) * decayed_scores.at[n][e] * pair.at[n][e]
                                : 0.f;
        subtracted[e >> 1] += value, sums[e & 1] += value;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_over_col(sums[i]);
        if (lane_row() == 0) {
          storage.scalars(warp_tile.pipe.stage).dL[j - warp_tile.tile][8 * n + lane_col() + i] = sum;
        }
      }
    }
    dL.x -= sum_over_row(subtracted[0]), dL.y -= sum_over_row(subtracted[1]);
  }

  // Computes the gradients of the tokens of a tile. `memories` provides A' and then A.
  template <class Memories>
  __device__ void compute_gradients(const WarpTile& warp_tile, const typename Storage::Memory& G,
                                    const Memories& memories) const {
    const int s = warp_tile.pipe.stage, memory = coord.memory;
    const bool has_gates = p.dL != nullptr;
    auto& stage_scalars = storage.scalars(s);
    const auto& gates = stage_scalars.gates;
    const float2 gamma{gates[lane_row()].gamma, gates[lane_row() + 8].gamma},
        log_decay_to_end{gates[lane_row()].log_decay_to_end, gates[lane_row() + 8].log_decay_to_end};
    const TrellisLogDecays L(gates);
    const StageTile x = storage.stage_tile(s, Storage::kX);
    float2 dL{0.f, 0.f};  // of the lane's rows
    float end = 0.f;      // the lane's terms of dL of the last token of the chunk

    // E_ti (u_i.l_t)
    AFragment<K> u, dz;
    load_blocks(u, storage.stage_tile(s, Storage::kU));
    AFragment<1> scores[Storage::kOutputWarps];
#pragma unroll
    for (int j = 0; j < Storage::kOutputWarps; ++j) {
      if (warp_tile.tile + j >= warp_tile.tiles) break;
      const int other = warp_tile.stage(warp_tile.tile + j);
      Accumulator<2> sums;
      fill(sums, 0.f);
      add_product_transposed<T>(sums, u, storage.stage_tile(other, Storage::kL));
      apply_token_decay_transposed(sums, L, storage.scalars(other).gates, j == 0,
                                   warp_tile.rows(warp_tile.tile + j));
      if (has_gates) add_gate_pairs(warp_tile, sums, warp_tile.tile + j, gamma, dL);
      round_to_a_fragment<T>(scores[j], sums);
    }

    // c, dgamma, and dx = -gamma c + dZ A'. dx replaces intra_du, which the state warps have read. The tile
    // kZ holds dz.
    const StageTile dx = storage.stage_tile(s, Storage::kIntraDu);
    const auto chunk_start = memories.wait_chunk_start();  // A'
    load_blocks(dz, storage.stage_tile(s, Storage::kZ));
    const float2 to_end{exp2_fast(log_decay_to_end.x), exp2_fast(log_decay_to_end.y)};
    float2 end_dots{0.f, 0.f}, dgamma{0.f, 0.f};
    for_columns([&](int col) {
      Accumulator<2> c, x_block;
      fill(c, 0.f);
      add_product<T>(c, u, G, 0, col);
      scale_rows(c, to_end);
      load_block_fp32<T>(x_block, x, 0, col);
      add_dots(end_dots, c, x_block);
#pragma unroll
      for (int j = 0; j < Storage::kOutputWarps; ++j) {
        if (warp_tile.tile + j >= warp_tile.tiles) break;
        add_product<T>(c, scores[j].at[0],
                       storage.stage_tile(warp_tile.stage(warp_tile.tile + j), Storage::kW), 0, col);
      }
      add_dots(dgamma, c, x_block);
      scale_rows(c, {-gamma.x, -gamma.y});
      add_product<T>(c, dz, chunk_start, 0, col);
      AFragment<1> rounded;
      round_to_a_fragment<T>(rounded, c);
      store_block(dx, 0, col, rounded.at[0]);
    });
    dgamma = sum_over_quad(dgamma);
    if (lane_col() == 0) {
      float* to = p.dgammas + memory * token_count();
      if (lane_row() < warp_tile.rows(warp_tile.tile))
        to[token_index(warp_tile, warp_tile.tile, lane_row())] = -dgamma.x;
      if (lane_row() + 8 < warp_tile.rows(warp_tile.tile))
        to[token_index(warp_tile, warp_tile.tile, lane_row() + 8)] = -dgamma.y;
    }

    if (has_gates) {
      end_dots = sum_over_quad(end_dots);
      end_dots = {gamma.x * end_dots.x, gamma.y * end_dots.y};
      dL.x += end_dots.x, dL.y += end_dots.y;
      // All four lanes of a row have the sum: count it once.
      if (lane_col() == 0) end = -end_dots.x - end_dots.y;
      // e^{L_t} l_t^T A w_t
      const auto A = memories.wait_before_chunk();
      const StageTile w = storage.stage_tile(s, Storage::kW);
      float2 dot{0.f, 0.f};
      AFragment<K>& l = u;  // u is not needed any more
      load_blocks(l, storage.stage_tile(s, Storage::kL));
      for_columns([&](int col) {
        Accumulator<2> lA, w_block;
        fill(lA, 0.f);
        add_product<T>(lA, l, A, 0, col);
        load_block_fp32<T>(w_block, w, 0, col);
        add_dots(dot, lA, w_block);
      });
      dot = sum_over_quad(dot);
      dL.x = fmaf(exp2_fast(L.log_decay.x), dot.x, dL.x), dL.y = fmaf(exp2_fast(L.log_decay.y), dot.y, dL.y);
      end += stage_scalars.decay * dot_states(warp_tile, G, A);
      end = sum_over_col(sum_over_row(end));
      __syncwarp();
      if (lane_col() == 0)
        stage_scalars.dL[0][lane_row()] += dL.x, stage_scalars.dL[0][lane_row() + 8] += dL.y;
      __syncwarp();
      const int last = warp_tile.tiles - 1;
      if (lane() == 0) stage_scalars.dL[last - warp_tile.tile][warp_tile.rows(last) - 1] += end;
      __syncwarp();
      float* to = p.dL + (memory * ((p.shape.grid.size + kTokenTile - 1) / kTokenTile) + warp_tile.tile) *
                             token_count();
      for (int j = warp_tile.tile; j < warp_tile.tiles; ++j) {
        if (lane() < warp_tile.rows(j))
          to[token_index(warp_tile, j, lane())] = stage_scalars.dL[j - warp_tile.tile][lane()];
      }
    }
    __syncwarp();
    store_tile(warp_tile, p.dx[memory], dx, p.shape.width(memory));
    store_tile(warp_tile, p.da[memory], storage.stage_tile(s, Storage::kTargets), p.shape.M);
  }
  __device__ void store_tile(const WarpTile& warp_tile, const OutputTensor<4>& to, const StageTile& tile,
                             int width) const {
    store_rows<1>(tile,
                  row_of<T>(to, coord.chunked.sequence.batch, warp_tile.token(warp_tile.tile), coord.head),
                  to.stride[1], warp_tile.rows(warp_tile.tile), width, 0);
  }

  // The memories of a chunk in the ring: A before the chunk, or A' and then A. An output warp waits for each
  // memory at its use, and releases all of them. wait_chunk_start() returns A', wait_before_chunk() A.
  struct ChunkMemories {
    const Storage& storage;
    PipelineState& memory_pipe;
    int& unreleased;                // memories to release
    bool has_separate_chunk_start;  // A' and A differ

    __device__ typename Storage::Memory wait_chunk_start() const { return wait_memory(); }
    __device__ typename Storage::Memory wait_before_chunk() const {
      if (has_separate_chunk_start) release_memory();
      return wait_memory();
    }
    __device__ void release_memory() const {
      storage.barriers().memory_full.wait(memory_pipe);
      storage.barriers().memory_empty.arrive_warp(memory_pipe.stage);
      memory_pipe.next(Storage::kMemoryStages);
      --unreleased;
    }

   private:
    __device__ typename Storage::Memory wait_memory() const {
      storage.barriers().memory_full.wait(memory_pipe);
      return storage.memory(memory_pipe.stage);
    }
  };

  __device__ void run(int output_warp) const {
    if constexpr (HasOneTile) {
      run_single_tile_chunks(output_warp);
    } else {
      run_multi_tile_chunks(output_warp);
    }
  }

  // A chunk is one tile. Its output warp releases the tile and the memories.
  __device__ void run_single_tile_chunks(int output_warp) const {
    // The ring of memories and the ring of gradients advance together: only the last chunk to be processed
    // may have a second memory. There may be fewer stages than output warps.
    PipelineState token_pipe, gradient_pipe;
    const auto skip = [&](int chunks) {
      token_pipe.skip(chunks, Storage::kStages);
      for (int i = 0; i < chunks; ++i) gradient_pipe.next(Storage::kMemoryStages);
    };
    skip(output_warp);
#pragma unroll 1
    for (int64_t i = coord.chunked.chunks - 1 - output_warp; i >= 0; i -= Storage::kOutputWarps) {
      const bool has_separate_chunk_start = is_resumed(p.chunk_start[coord.memory], i);
      int unreleased = has_separate_chunk_start ? 2 : 1;
      storage.barriers().dz_full.wait(token_pipe);  // implies that G is stored
      PipelineState memory_pipe = gradient_pipe;
      // Hides the constants from the compiler, which otherwise unrolls into more registers than there are.
      int tile = 0, tiles = 1;
      ptx::make_opaque(tile, tiles);
      const ChunkMemories memories{storage, memory_pipe, unreleased, has_separate_chunk_start};
      compute_gradients(WarpTile(chunk_of(p.shape.grid, coord.chunked, i), token_pipe, tile, tiles),
                        storage.gradient(gradient_pipe.stage), memories);
      while (unreleased > 0) memories.release_memory();
      storage.barriers().empty.arrive_warp(token_pipe.stage);
      storage.barriers().gradient_empty.arrive_warp(gradient_pipe.stage);
      skip(Storage::kOutputWarps);
    }
  }

  __device__ void run_multi_tile_chunks(int output_warp) const {
    PipelineState token_pipe, gradient_pipe, memory_pipe;
    unsigned earlier_tiles = 0;  // tiles of the chunks processed earlier
    for (int64_t i = coord.chunked.chunks - 1; i >= 0; --i) {
      const Chunk chunk = chunk_of(p.shape.grid, coord.chunked, i);
      const int tiles = tiles_in(chunk),
                own_index = static_cast<int>((output_warp - earlier_tiles) % Storage::kOutputWarps);
      const bool has_separate_chunk_start = is_resumed(p.chunk_start[coord.memory], i);
      int unreleased = has_separate_chunk_start ? 2 : 1;
      storage.barriers().gradient_full.wait(gradient_pipe);
      const ChunkMemories memories{storage, memory_pipe, unreleased, has_separate_chunk_start};
      if (own_index < tiles) {
        const WarpTile warp_tile(chunk, token_pipe, tiles - 1 - own_index, tiles);
        // The state warps store the tiles in order: the later wait implies the earlier ones.
        storage.barriers().dz_full.wait(warp_tile.pipe);
        compute_gradients(warp_tile, storage.gradient(gradient_pipe.stage), memories);
      }
      while (unreleased > 0) memories.release_memory();
      for (int j = 0; j < tiles; ++j, token_pipe.next(Storage::kStages)) {
        storage.barriers().dz_full.wait(token_pipe);
        storage.barriers().empty.arrive_warp(token_pipe.stage);
      }
      storage.barriers().gradient_empty.arrive_warp(gradient_pipe.stage);
      gradient_pipe.next(Storage::kMemoryStages);
      earlier_tiles += tiles;
    }
  }
};

}  // namespace girih::kernels

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
#include "trellis/reverse_storage.cuh"

namespace girih::kernels {

// Short: a chunk has at most one tile.
template <typename T, int Tile, bool Short>
struct TrellisReverseOutputWarp {
  using Storage = TrellisReverseStorage<T, Tile>;
  using Token = typename Storage::Token;
  static constexpr int K = Tile / 16;

  const TrellisReverse& p;
  const TrellisBlockCoord& coord;
  const Storage& storage;

  // A tile of an output warp: its chunk, the stage of the chunk's last tile, and the stage of its own tile.
  struct ReaderTile {
    Chunk chunk;
    PipelineState first_pipe, own_pipe;
    int tile, tiles;
    __device__ ReaderTile(const Chunk& chunk, const PipelineState& first, int tile, int tiles)
        : chunk(chunk), first_pipe(first), own_pipe(first), tile(tile), tiles(tiles) {
      own_pipe.skip(tiles - 1 - tile, Storage::kStages);
    }
    // Stage of tile j; tiles are loaded from the last one on.
    __device__ int stage(int j) const {
      const int s = first_pipe.stage + tiles - 1 - j;
      return s < Storage::kStages ? s : s - Storage::kStages;
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
  __device__ float product_of_states(const ReaderTile& at, const typename Storage::Memory& G,
                                     const typename Storage::Memory& A) const {
    float sum = 0.f;
    for (int m = at.tile * 16; m < p.shape.M; m += 16 * at.tiles) {
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
  __device__ int64_t token_index(const ReaderTile& at, int j, int row) const {
    const TrellisShape& shape = p.shape;
    return (coord.chunked.sequence.batch * shape.grid.tokens.tokens + at.token(j) + row) * shape.heads +
           coord.head;
  }
  __device__ int64_t token_count() const {
    return p.shape.grid.tokens.batch * p.shape.grid.tokens.tokens * p.shape.heads;
  }

  // pair_ti for i in the output warp's tile and t in tile j, from the scores E (u_i.l_t): subtracts the sums
  // over t from dL of i, and stores the sums over i in the stage's scalars.
  __device__ void add_gate_pairs(const ReaderTile& at, const Accumulator<2>& decayed_scores, int j,
                                 float2 gamma, float2& dL) const {
    const Token x = storage.token(at.own_pipe.stage, Storage::kX),
                w = storage.token(at.stage(j), Storage::kW);
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
        const float value = j > at.tile || i < t
                                ? -(e < 2 ? gamma.x : gamma.y) * decayed_scores.at[n][e] * pair.at[n][e]
                                : 0.f;
        subtracted[e >> 1] += value, sums[e & 1] += value;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = sum_over_col(sums[i]);
        if (lane_row() == 0) {
          storage.scalars(at.own_pipe.stage).dL[j - at.tile][8 * n + lane_col() + i] = sum;
        }
      }
    }
    dL.x -= sum_over_row(subtracted[0]), dL.y -= sum_over_row(subtracted[1]);
  }

  // `memories` provides A', then A if A is not A'.
  template <class Memories>
  __device__ void compute_gradients(const ReaderTile& at, const typename Storage::Memory& G,
                                    const Memories& memories) const {
    const int s = at.own_pipe.stage, memory = coord.memory;
    const bool gated = p.dL != nullptr;
    auto& stage_scalars = storage.scalars(s);
    const auto& gates = stage_scalars.gates;
    const float2 gamma{gates[lane_row()].gamma, gates[lane_row() + 8].gamma},
        log_decay_to_end{gates[lane_row()].log_decay_to_end, gates[lane_row() + 8].log_decay_to_end};
    const TrellisLogDecays L(gates);
    const Token x = storage.token(s, Storage::kX);
    float2 dL{0.f, 0.f};
    float end = 0.f;  // the lane's terms of dL at the end of the chunk

    // E_ti (u_i.l_t)
    AFragment<K> u, z;
    load_blocks(u, storage.token(s, Storage::kU));
    AFragment<1> scores[Storage::kOutputWarps];
#pragma unroll
    for (int j = 0; j < Storage::kOutputWarps; ++j) {
      if (at.tile + j >= at.tiles) break;
      const int other = at.stage(at.tile + j);
      Accumulator<2> sums;
      fill(sums, 0.f);
      add_product_transposed<T>(sums, u, storage.token(other, Storage::kL));
      apply_token_decay_transposed(sums, L, storage.scalars(other).gates, j == 0, at.rows(at.tile + j));
      if (gated) add_gate_pairs(at, sums, at.tile + j, gamma, dL);
      round_to_a_fragment<T>(scores[j], sums);
    }

    // c, dgamma, and dx = -gamma c + dZ A', which replaces the tile that the state warps no longer need
    const Token dx = storage.token(s, Storage::kIntraDu);
    const auto first = memories.first();
    load_blocks(z, storage.token(s, Storage::kZ));
    const float2 to_end{exp2_fast(log_decay_to_end.x), exp2_fast(log_decay_to_end.y)};
    float2 end_dots{0.f, 0.f}, dgamma{0.f, 0.f};
    for_columns([&](int col) {
      Accumulator<2> c, own;
      fill(c, 0.f);
      add_product<T>(c, u, G, 0, col);
      scale_rows(c, to_end);
      load_wide<T>(own, x, 0, col);
      add_dots(end_dots, c, own);
#pragma unroll
      for (int j = 0; j < Storage::kOutputWarps; ++j) {
        if (at.tile + j >= at.tiles) break;
        add_product<T>(c, scores[j].at[0], storage.token(at.stage(at.tile + j), Storage::kW), 0, col);
      }
      add_dots(dgamma, c, own);
      scale_rows(c, {-gamma.x, -gamma.y});
      add_product<T>(c, z, first, 0, col);
      AFragment<1> rounded;
      round_to_a_fragment<T>(rounded, c);
      store_block(dx, 0, col, rounded.at[0]);
    });
    dgamma = sum_over_quad(dgamma);
    if (lane_col() == 0) {
      float* to = p.dgammas + memory * token_count();
      if (lane_row() < at.rows(at.tile)) to[token_index(at, at.tile, lane_row())] = -dgamma.x;
      if (lane_row() + 8 < at.rows(at.tile)) to[token_index(at, at.tile, lane_row() + 8)] = -dgamma.y;
    }

    if (gated) {
      end_dots = sum_over_quad(end_dots);
      end_dots = {gamma.x * end_dots.x, gamma.y * end_dots.y};
      dL.x += end_dots.x, dL.y += end_dots.y;
      // All four lanes of a row have the sum: count it once.
      if (lane_col() == 0) end = -end_dots.x - end_dots.y;
      // e^{L_t} l_t^T A w_t
      const auto A = memories.second();
      const Token w = storage.token(s, Storage::kW);
      float2 dot{0.f, 0.f};
      load_blocks(u, storage.token(s, Storage::kL));
      for_columns([&](int col) {
        Accumulator<2> compute_gradients, own;
        fill(compute_gradients, 0.f);
        add_product<T>(compute_gradients, u, A, 0, col);
        load_wide<T>(own, w, 0, col);
        add_dots(dot, compute_gradients, own);
      });
      dot = sum_over_quad(dot);
      dL.x = fmaf(exp2_fast(L.sum.x), dot.x, dL.x), dL.y = fmaf(exp2_fast(L.sum.y), dot.y, dL.y);
      end += stage_scalars.decay * product_of_states(at, G, A);
      end = sum_over_col(sum_over_row(end));
      __syncwarp();
      if (lane_col() == 0)
        stage_scalars.dL[0][lane_row()] += dL.x, stage_scalars.dL[0][lane_row() + 8] += dL.y;
      __syncwarp();
      const int last = at.tiles - 1;
      if (lane() == 0) stage_scalars.dL[last - at.tile][at.rows(last) - 1] += end;
      __syncwarp();
      float* to = p.dL + (memory * ((p.shape.grid.size + kTile - 1) / kTile) + at.tile) * token_count();
      for (int j = at.tile; j < at.tiles; ++j) {
        if (lane() < at.rows(j)) to[token_index(at, j, lane())] = stage_scalars.dL[j - at.tile][lane()];
      }
    }
    __syncwarp();
    store_tile(at, p.dx[memory], dx, p.shape.width(memory));
    store_tile(at, p.da[memory], storage.token(s, Storage::kA), p.shape.M);
  }
  __device__ void store_tile(const ReaderTile& at, const OutputTensor<4>& to, const Token& tile,
                             int width) const {
    store_rows<1>(tile, row_of<T>(to, coord.chunked.sequence.batch, at.token(at.tile), coord.head),
                  to.stride[1], at.rows(at.tile), width, 0);
  }

  // The memories of a chunk. An output warp waits for each memory at its use, and releases all of them.
  struct Memories {
    const Storage& storage;
    PipelineState& memory_pipe;
    int& unreleased;          // memories to release
    bool has_separate_first;  // A' and A differ

    __device__ typename Storage::Memory first() const { return wait_memory(); }
    __device__ typename Storage::Memory second() const {
      if (has_separate_first) release_memory();
      return wait_memory();
    }
    __device__ void release_memory() const {
      wait(storage.memory_full() + memory_pipe.stage, memory_pipe.phase);
      arrive_warp(storage.memory_empty() + memory_pipe.stage);
      memory_pipe.next(Storage::kMemoryStages);
      --unreleased;
    }

   private:
    __device__ typename Storage::Memory wait_memory() const {
      wait(storage.memory_full() + memory_pipe.stage, memory_pipe.phase);
      return storage.memory(memory_pipe.stage);
    }
  };

  __device__ void run(int output_warp) const {
    if constexpr (Short) {
      run_short(output_warp);
    } else {
      run_long(output_warp);
    }
  }

  // A chunk is one tile. Its output warp releases the tile and the memories.
  __device__ void run_short(int output_warp) const {
    // The ring of memories and the ring of gradients advance together: only the last chunk to be processed
    // may have a second memory. There may be fewer stages than output warps.
    PipelineState stage, gradient_pipe;
    const auto skip = [&](int chunks) {
      stage.skip(chunks, Storage::kStages);
      for (int i = 0; i < chunks; ++i) gradient_pipe.next(Storage::kMemoryStages);
    };
    skip(output_warp);
#pragma unroll 1
    for (int64_t i = coord.chunked.chunks - 1 - output_warp; i >= 0; i -= Storage::kOutputWarps) {
      const bool has_separate_first = is_resumed(p.chunk_start[coord.memory], i);
      int unreleased = has_separate_first ? 2 : 1;
      wait(storage.dz_full() + stage.stage, stage.phase);  // implies that G is stored
      PipelineState memory_pipe = gradient_pipe;
      // Hides the constants from the compiler, which otherwise unrolls into more registers than there are.
      int tile = 0, tiles = 1;
      ptx::make_opaque(tile, tiles);
      const Memories memories{storage, memory_pipe, unreleased, has_separate_first};
      compute_gradients(ReaderTile(chunk_of(p.shape.grid, coord.chunked, i), stage, tile, tiles),
                        storage.gradient(gradient_pipe.stage), memories);
      while (unreleased > 0) memories.release_memory();
      arrive_warp(storage.empty() + stage.stage);
      arrive_warp(storage.gradient_empty() + gradient_pipe.stage);
      skip(Storage::kOutputWarps);
    }
  }

  __device__ void run_long(int output_warp) const {
    PipelineState stage, gradient_pipe, memory_pipe;
    unsigned earlier_tiles = 0;  // tiles of the chunks processed earlier
    for (int64_t i = coord.chunked.chunks - 1; i >= 0; --i) {
      const Chunk chunk = chunk_of(p.shape.grid, coord.chunked, i);
      const int tiles = tiles_in(chunk),
                own_index = static_cast<int>((output_warp - earlier_tiles) % Storage::kOutputWarps);
      const bool has_separate_first = is_resumed(p.chunk_start[coord.memory], i);
      int unreleased = has_separate_first ? 2 : 1;
      wait(storage.gradient_full() + gradient_pipe.stage, gradient_pipe.phase);
      const Memories memories{storage, memory_pipe, unreleased, has_separate_first};
      if (own_index < tiles) {
        const ReaderTile at(chunk, stage, tiles - 1 - own_index, tiles);
        // The state warps store the tiles in order: the later wait implies the earlier ones.
        wait(storage.dz_full() + at.own_pipe.stage, at.own_pipe.phase);
        compute_gradients(at, storage.gradient(gradient_pipe.stage), memories);
      }
      while (unreleased > 0) memories.release_memory();
      for (int j = 0; j < tiles; ++j, stage.next(Storage::kStages)) {
        wait(storage.dz_full() + stage.stage, stage.phase);
        arrive_warp(storage.empty() + stage.stage);
      }
      arrive_warp(storage.gradient_empty() + gradient_pipe.stage);
      gradient_pipe.next(Storage::kMemoryStages);
      earlier_tiles += tiles;
    }
  }
};

}  // namespace girih::kernels

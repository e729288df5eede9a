// The loads of gradients. With TMA the first thread of the block copies whole tiles (copies by all threads
// cost a fifth of their instructions for addresses); without TMA all threads copy.
#pragma once

#include "delta_product/gradient_tiles.cuh"
#include "tile/tma.h"

namespace girih::kernels::delta_product {

// Tensor maps of the rows of steps, of tokens and of states. A box of tokens has 64 or 32 rows.
struct GradientTensorMaps {
  TensorMap k, v, dz, q, dout, states, gradients;
};

inline cudaError_t encode_tensor_map(GradientTensorMaps& maps, const DeltaGradients& p) {
  const DeltaShape& shape = p.shape;
  const int64_t batch = shape.tokens.batch, tokens = shape.tokens.tokens, rows = tokens * shape.n,
                chunks = token_range_count(shape.tokens, delta_chunk_tokens(shape.n)), heads = shape.heads,
                output_heads = shape.output_heads, D = shape.D, V = shape.V;
  const int token_box_rows = token_rows(has_many_tokens(delta_chunk_tokens(shape.n)));
  const auto state = [&](const void* data) {
    return InputTensor<4>{data, shape.dtype, {V * D, D, V * D, 1}};
  };
  const struct {
    TensorMap& maps;
    InputTensor<4> tensor;
    int64_t sizes[4];
    int rows;
  } all[] = {{maps.k, p.k, {batch, rows, heads / shape.key_share, D}, kDeltaChunkRows},
             {maps.v, p.v, {batch, rows, heads, V}, kDeltaChunkRows},
             {maps.dz, p.dz, {batch, rows, heads, V}, kDeltaChunkRows},
             {maps.q, p.q, {batch, tokens, output_heads / shape.query_share, D}, token_box_rows},
             {maps.dout, p.dout, {batch, tokens, output_heads, V}, token_box_rows},
             {maps.states, state(p.states), {chunks * heads, V, 1, D}, kDeltaChunkRows},
             {maps.gradients, state(p.gradients), {chunks * heads, V, 1, D}, kDeltaChunkRows}};
  for (const auto& one : all) {
    if (const cudaError_t error = kernels::encode_tensor_map(one.maps, one.tensor, one.sizes, one.rows);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// The first 32 rows of a tile, for a load of their own.
template <typename T, int Cols>
struct HalfTile : BlockTile<T, Cols> {
  static constexpr int kRows = kDeltaChunkRows / 2;
};

// The loads of a block. All threads call every start_* and every wait_*. With TMA the data are visible after
// the wait; otherwise after the next barrier of the block or the warpgroup.
template <typename T, int D, bool OneSlab>
class GradientLoads {
  using Sizes = GradientSizes<D>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  using Rows = typename Tiles::Rows;
  using Values = typename Tiles::Values;
  static constexpr int kThreads = Sizes::kThreads;

  const DeltaGradients& p;
  const GradientTensorMaps& maps;
  const Tiles& tile;

 public:
  __device__ GradientLoads(const DeltaGradients& p, const GradientTensorMaps& maps, const Tiles& tile)
      : p(p), maps(maps), tile(tile) {}

  // Called by the thread that starts the TMA copies.
  __device__ void init() const {
    GradientBarriers& barriers = *tile.barriers;
    init_barrier(&barriers.states, 1);
    init_barrier(&barriers.keys, 1);
    init_barrier(&barriers.values, 1);
    init_barrier(&barriers.gradients, 1);
    init_barrier(&barriers.queries, 1);
    fence_barrier_init();
  }

  // A slab of columns of S.
  __device__ void start_states(uint32_t number, int v) const {
    if constexpr (kHasTma) {
      if (threadIdx.x != 0) return;
      arrive_expect_tx(&tile.barriers->states, Tiles::kStateBytes);
      copy_state(tile.states, maps.states, number, v, &tile.barriers->states);
    } else {
      load_state(tile.states, p.states, number, v);
      commit_copies();
    }
  }
  // Keys, prepared data and factors of the chunk.
  __device__ void start_keys(const ChunkInfo& chunk_info) const {
    const unsigned char* const prepared = chunk_info.prepared(p);
    const float* const factors = p.factors + static_cast<uint64_t>(blockIdx.x) * kDeltaChunkRows;
    if constexpr (kHasTma) {
      if (threadIdx.x != 0) return;
      uint64_t* const barrier = &tile.barriers->keys;
      arrive_expect_tx(barrier, Rows::kBytes + Tiles::kPreparedBytes + Tiles::kFactorBytes);
      copy_rows(tile.k, maps.k, chunk_info.range.start * p.shape.n, 0, key_head(chunk_info), chunk_info,
                barrier);
      bulk_load(tile.prepared, prepared, Tiles::kPreparedBytes, barrier);
      bulk_load(tile.factors, factors, Tiles::kFactorBytes, barrier);
    } else {
#pragma unroll
      for (int i = 0; i < Tiles::kPreparedBytes; i += kThreads * 16) {
        const int at = i + static_cast<int>(threadIdx.x) * 16;
        if (at < Tiles::kPreparedBytes) copy_async(shared_address(tile.prepared + at), prepared + at, true);
      }
      if (threadIdx.x < kDeltaChunkRows / 4)
        copy_async(shared_address(tile.factors + threadIdx.x * 4), factors + threadIdx.x * 4, true);
      const T* const from = at<T>(p.k, chunk_info.range.sequence.batch, chunk_info.range.start * p.shape.n,
                                  key_head(chunk_info), 0);
      load_async<kThreads>(tile.k, from, p.k.stride[1], chunk_info.rows, p.shape.D, threadIdx.x);
      commit_copies();
    }
  }
  // A slab of columns of v, G and do, and of dS if dS has memory of its own. Otherwise dS is prefetched to
  // the L2 cache, unless <S, dS> reads it.
  __device__ void start_values(const ChunkInfo& chunk_info, int v) const {
    if constexpr (kHasTma) {
      if (threadIdx.x != 0) return;
      uint64_t* const barrier = &tile.barriers->values;
      const int64_t row = chunk_info.range.start * p.shape.n;
      arrive_expect_tx(barrier, 2 * Values::kBytes + token_rows(chunk_info.many_tokens) * Sizes::kSlab * 2 +
                                    (Sizes::kHasBothStates ? Tiles::kStateBytes : 0));
      copy_rows(tile.u, maps.v, row, v, chunk_info.head, chunk_info, barrier);
      copy_rows(tile.dout, maps.dout, chunk_info.range.start, v, chunk_info.output_head, chunk_info, barrier);
      copy_rows(tile.g, maps.dz, row, v, chunk_info.head, chunk_info, barrier);
      if (Sizes::kHasBothStates) {
        copy_state(tile.gradients, maps.gradients, chunk_info.number, v, barrier);
      } else if (!(p.gated && chunk_info.is_first_head)) {
        for_each_box_of_state(chunk_info.number, v,
                              [&](int, const TmaCoords& at) { tma_prefetch(maps.gradients, at); });
      }
    } else {
      const int64_t batch = chunk_info.range.sequence.batch, row = chunk_info.range.start * p.shape.n;
      const int cols = p.shape.V - v;
      load_async<kThreads>(tile.u, at<T>(p.v, batch, row, chunk_info.head, v), p.v.stride[1], chunk_info.rows,
                           cols, threadIdx.x);
      load_async<kThreads>(tile.g, at<T>(p.dz, batch, row, chunk_info.head, v), p.dz.stride[1],
                           chunk_info.rows, cols, threadIdx.x);
      load_tokens<kThreads>(tile.dout,
                            at<T>(p.dout, batch, chunk_info.range.start, chunk_info.output_head, v),
                            p.dout.stride[1], cols, chunk_info);
      if (Sizes::kHasBothStates) {
        load_state(tile.gradients, p.gradients, chunk_info.number, v);
      } else if (!(p.gated && chunk_info.is_first_head)) {
        prefetch_state(p.gradients, chunk_info.number, v);
      }
      commit_copies();
    }
  }
  // A slab of columns of dS, in the memory of S.
  __device__ void start_gradients(const ChunkInfo& chunk_info, int v) const {
    if constexpr (kHasTma) {
      if (threadIdx.x != 0) return;
      arrive_expect_tx(&tile.barriers->gradients, Tiles::kStateBytes);
      copy_state(tile.gradients, maps.gradients, chunk_info.number, v, &tile.barriers->gradients);
    } else {
      load_state(tile.gradients, p.gradients, chunk_info.number, v);
      commit_copies();
    }
  }
  // Queries, by `Threads` threads from the first of a warpgroup on.
  template <int Threads>
  __device__ void start_queries(const ChunkInfo& chunk_info) const {
    if constexpr (kHasTma) {
      if (threadIdx.x % Threads != 0) return;
      arrive_expect_tx(&tile.barriers->queries, token_rows(chunk_info.many_tokens) * D * 2);
      copy_rows(tile.q, maps.q, chunk_info.range.start, 0, query_head_index(chunk_info), chunk_info,
                &tile.barriers->queries);
    } else {
      load_tokens<Threads>(tile.q,
                           at<T>(p.q, chunk_info.range.sequence.batch, chunk_info.range.start,
                                 query_head_index(chunk_info), 0),
                           p.q.stride[1], p.shape.D, chunk_info);
      commit_copies();
    }
  }
  // Prefetches queries to the L2 cache if their memory is still in use.
  __device__ void prefetch_queries(const ChunkInfo& chunk_info) const {
    if constexpr (kHasTma) {
      if (threadIdx.x != 0) return;
#pragma unroll
      for (int col = 0; col < D; col += 64) {
        tma_prefetch(maps.q, {col, static_cast<int>(chunk_info.range.start), query_head_index(chunk_info),
                              static_cast<int>(chunk_info.range.sequence.batch)});
      }
    } else {
      constexpr int kLines = D / 64;
      const T* const from = at<T>(p.q, chunk_info.range.sequence.batch, chunk_info.range.start,
                                  query_head_index(chunk_info), 0);
      const int row = threadIdx.x / kLines, col = threadIdx.x % kLines * 64;
      if (row < chunk_info.range.length && col < p.shape.D) prefetch(from + row * p.q.stride[1] + col);
    }
  }

  // Waits for S and for data that all slabs share; `slab` is the index of the slab.
  __device__ void wait_states(const ChunkInfo& chunk_info, int slab) const {
    if constexpr (kHasTma) {
      wait(&tile.barriers->states, slab & 1);
      wait(&tile.barriers->keys, 0);
      if (chunk_info.rows < kDeltaChunkRows) {
        clear_after<kThreads>(tile.k, chunk_info.rows, kDeltaChunkRows);
        sync_tiles();
      }
    } else {
      wait_copies<1>();
      __syncthreads();
    }
  }
  __device__ void wait_values(const ChunkInfo& chunk_info, int slab) const {
    if constexpr (kHasTma) {
      wait(&tile.barriers->values, slab & 1);
      if (chunk_info.rows < kDeltaChunkRows || chunk_info.range.length < token_rows(chunk_info.many_tokens)) {
        clear_after<kThreads>(tile.u, chunk_info.rows, kDeltaChunkRows);
        clear_after<kThreads>(tile.g, chunk_info.rows, kDeltaChunkRows);
        clear_after<kThreads>(tile.dout, chunk_info.range.length, token_rows(chunk_info.many_tokens));
        sync_tiles();
      }
    } else {
      wait_copies<0>();
      __syncthreads();
    }
  }
  __device__ void wait_gradients(int slab) const {
    if constexpr (kHasTma) {
      wait(&tile.barriers->gradients, slab & 1);
    } else {
      wait_copies<0>();
      __syncthreads();
    }
  }
  // Called once by all threads of the block or of one warpgroup, before their barrier.
  template <int Threads>
  __device__ void wait_queries(const ChunkInfo& chunk_info) const {
    if constexpr (kHasTma) {
      wait(&tile.barriers->queries, 0);
      clear_after<Threads>(tile.q, chunk_info.range.length, token_rows(chunk_info.many_tokens));
    } else {
      wait_copies<0>();
    }
  }

 private:
  __device__ int key_head(const ChunkInfo& chunk_info) const { return chunk_info.head / p.shape.key_share; }
  __device__ int query_head_index(const ChunkInfo& chunk_info) const {
    return chunk_info.output_head / p.shape.query_share;
  }

  __device__ static void sync_tiles() {
    fence_async_proxy();
    __syncthreads();
  }
  // Clears the rows of a tile beyond the chunk: a TMA box also copies rows of the next chunk.
  template <int Threads, class Tile>
  __device__ static void clear_after(const Tile& tile, int first, int rows) {
    constexpr int kPacks = Tile::kCols / 8;
#pragma unroll 1
    for (int i = first * kPacks + static_cast<int>(threadIdx.x) % Threads; i < rows * kPacks; i += Threads) {
      *reinterpret_cast<uint4*>(&tile.at(i / kPacks, i % kPacks * 8)) = uint4{0u, 0u, 0u, 0u};
    }
  }

  template <int Cols>
  __device__ static void copy_rows(const BlockTile<T, Cols>& tile, const TensorMap& maps, int64_t row,
                                   int col, int head, const ChunkInfo& chunk_info, uint64_t* barrier) {
#pragma unroll
    for (int i = 0; i < Cols; i += 64) {
      tma_load(shared_address(tile.block(i).data), maps,
               {col + i, static_cast<int>(row), head, static_cast<int>(chunk_info.range.sequence.batch)},
               barrier);
    }
  }
  // Calls f(byte offset in shared memory, coordinates) for every box of a slab of columns of a state.
  template <class F>
  __device__ static void for_each_box_of_state(uint32_t number, int v, const F& f) {
#pragma unroll
    for (int i = 0; i < Sizes::kValueGroups; ++i) {
#pragma unroll
      for (int d = 0; d < D; d += 64) {
        f(i * Rows::kBytes + d / 64 * Rows::Block::kBytes, {d, v + 64 * i, 0, static_cast<int>(number)});
      }
    }
  }
  __device__ static void copy_state(unsigned char* to, const TensorMap& maps, uint32_t number, int v,
                                    uint64_t* barrier) {
    for_each_box_of_state(number, v, [&](int offset, const TmaCoords& at) {
      tma_load(shared_address(to + offset), maps, at, barrier);
    });
  }

  __device__ void load_state(unsigned char* to, const void* states, uint32_t number, int v) const {
    const DeltaShape& shape = p.shape;
    const T* const from = state_at(static_cast<const T*>(states), shape, uint64_t{number}, v);
#pragma unroll
    for (int i = 0; i < Sizes::kValueGroups; ++i) {
      load_async<kThreads>(Rows{reinterpret_cast<T*>(to + i * Rows::kBytes)}, from + 64 * i * shape.D,
                           shape.D, shape.V - v - 64 * i, shape.D, threadIdx.x);
    }
  }
  __device__ void prefetch_state(const void* states, uint32_t number, int v) const {
    const int first = threadIdx.x * 64, count = min(Sizes::kSlab, p.shape.V - v) * p.shape.D;
    const T* const from = state_at(static_cast<const T*>(states), p.shape, uint64_t{number}, v) + first;
#pragma unroll
    for (int i = 0; i < Sizes::kSlab * D; i += kThreads * 64) {
      if (first + i < count) prefetch(from + i);
    }
  }
  template <int Threads, int Cols>
  __device__ static void load_tokens(const BlockTile<T, Cols>& tile, const T* from, int64_t stride, int cols,
                                     const ChunkInfo& chunk_info) {
    const int thread = threadIdx.x % Threads;
    if constexpr (!Sizes::kHasBothStates) {
      if (!chunk_info.many_tokens) {
        load_async<Threads>(HalfTile<T, Cols>{tile}, from, stride, chunk_info.range.length, cols, thread);
        return;
      }
    }
    load_async<Threads>(tile, from, stride, chunk_info.range.length, cols, thread);
  }
};

}  // namespace girih::kernels::delta_product

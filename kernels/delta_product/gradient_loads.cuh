// The loads of gradients. With TMA the first thread of the block copies whole tiles (copies by all threads
// cost a fifth of their instructions for addresses); without TMA all threads copy.
#pragma once

#include "delta_product/gradient_tiles.cuh"
#include "tile/boxes.h"

namespace girih::kernels::delta_product {

// Tensor maps of the rows of steps, of tokens and of states. A box of tokens has 64 or 32 rows.
struct GradientBoxes {
  Boxes k, v, dz, q, dout, states, gradients;
};

inline cudaError_t describe(GradientBoxes& boxes, const DeltaGradients& p) {
  const DeltaShape& shape = p.shape;
  const int64_t batch = shape.tokens.batch, tokens = shape.tokens.tokens, rows = tokens * shape.n,
                chunks = piece_count(shape.tokens, delta_chunk(shape.n)), heads = shape.heads,
                query_heads = shape.query_heads, D = shape.D, V = shape.V;
  const int of_tokens = token_rows(has_many(delta_chunk(shape.n)));
  const auto state = [&](const void* data) { return In<4>{data, shape.dtype, {V * D, D, V * D, 1}}; };
  const struct {
    Boxes& boxes;
    In<4> tensor;
    int64_t sizes[4];
    int rows;
  } all[] = {{boxes.k, p.k, {batch, rows, heads / shape.key_share, D}, kDeltaRows},
             {boxes.v, p.v, {batch, rows, heads, V}, kDeltaRows},
             {boxes.dz, p.dz, {batch, rows, heads, V}, kDeltaRows},
             {boxes.q, p.q, {batch, tokens, query_heads / shape.query_share, D}, of_tokens},
             {boxes.dout, p.dout, {batch, tokens, query_heads, V}, of_tokens},
             {boxes.states, state(p.states), {chunks * heads, V, 1, D}, kDeltaRows},
             {boxes.gradients, state(p.gradients), {chunks * heads, V, 1, D}, kDeltaRows}};
  for (const auto& one : all) {
    if (const cudaError_t error = kernels::describe(one.boxes, one.tensor, one.sizes, one.rows);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// The first 32 rows of a tile, for a load of their own.
template <typename T, int Cols>
struct HalfTile : BlockTile<T, Cols> {
  static constexpr int kRows = kDeltaRows / 2;
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
  const GradientBoxes& boxes;
  const Tiles& tile;

 public:
  __device__ GradientLoads(const DeltaGradients& p, const GradientBoxes& boxes, const Tiles& tile)
      : p(p), boxes(boxes), tile(tile) {}

  // Called by the thread that starts the TMA copies.
  __device__ void init() const {
    GradientBarriers& barriers = *tile.barriers;
    init_barrier(&barriers.states, 1);
    init_barrier(&barriers.keys, 1);
    init_barrier(&barriers.values, 1);
    init_barrier(&barriers.gradients, 1);
    init_barrier(&barriers.queries, 1);
    publish_barriers();
  }

  // A slab of columns of S.
  __device__ void start_states(uint32_t number, int v) const {
    if constexpr (kBoxes) {
      if (threadIdx.x != 0) return;
      arrive_expecting(&tile.barriers->states, Tiles::kStateBytes);
      copy_state(tile.states, boxes.states, number, v, &tile.barriers->states);
    } else {
      load_state(tile.states, p.states, number, v);
      commit_copies();
    }
  }
  // Keys, prepared data and factors of the chunk.
  __device__ void start_keys(const Here& here) const {
    const unsigned char* const prepared = here.prepared(p);
    const float* const factors = p.factors + static_cast<uint64_t>(blockIdx.x) * kDeltaRows;
    if constexpr (kBoxes) {
      if (threadIdx.x != 0) return;
      uint64_t* const barrier = &tile.barriers->keys;
      arrive_expecting(barrier, Rows::kBytes + Tiles::kPreparedBytes + Tiles::kFactorBytes);
      copy_rows(tile.k, boxes.k, here.piece.start * p.shape.n, 0, key_head(here), here, barrier);
      copy_bytes(tile.prepared, prepared, Tiles::kPreparedBytes, barrier);
      copy_bytes(tile.factors, factors, Tiles::kFactorBytes, barrier);
    } else {
#pragma unroll
      for (int i = 0; i < Tiles::kPreparedBytes; i += kThreads * 16) {
        const int at = i + static_cast<int>(threadIdx.x) * 16;
        if (at < Tiles::kPreparedBytes) copy_async(shared_address(tile.prepared + at), prepared + at, true);
      }
      if (threadIdx.x < kDeltaRows / 4)
        copy_async(shared_address(tile.factors + threadIdx.x * 4), factors + threadIdx.x * 4, true);
      const T* const from =
          at<T>(p.k, here.piece.sequence.batch, here.piece.start * p.shape.n, key_head(here), 0);
      load_async<kThreads>(tile.k, from, p.k.stride[1], here.rows, p.shape.D, threadIdx.x);
      commit_copies();
    }
  }
  // A slab of columns of v, G and do, and of dS if dS has memory of its own. Otherwise dS is prefetched to
  // the L2 cache, unless <S, dS> reads it.
  __device__ void start_values(const Here& here, int v) const {
    if constexpr (kBoxes) {
      if (threadIdx.x != 0) return;
      uint64_t* const barrier = &tile.barriers->values;
      const int64_t row = here.piece.start * p.shape.n;
      arrive_expecting(barrier, 2 * Values::kBytes + token_rows(here.many_tokens) * Sizes::kSlab * 2 +
                                    (Sizes::kApart ? Tiles::kStateBytes : 0));
      copy_rows(tile.u, boxes.v, row, v, here.head, here, barrier);
      copy_rows(tile.dout, boxes.dout, here.piece.start, v, here.query_head, here, barrier);
      copy_rows(tile.g, boxes.dz, row, v, here.head, here, barrier);
      if (Sizes::kApart) {
        copy_state(tile.gradients, boxes.gradients, here.number, v, barrier);
      } else if (!(p.gated && here.first)) {
        for_each_box_of_state(here.number, v,
                              [&](int, const BoxPlace& at) { prefetch_box(boxes.gradients, at); });
      }
    } else {
      const int64_t batch = here.piece.sequence.batch, row = here.piece.start * p.shape.n;
      const int cols = p.shape.V - v;
      load_async<kThreads>(tile.u, at<T>(p.v, batch, row, here.head, v), p.v.stride[1], here.rows, cols,
                           threadIdx.x);
      load_async<kThreads>(tile.g, at<T>(p.dz, batch, row, here.head, v), p.dz.stride[1], here.rows, cols,
                           threadIdx.x);
      load_tokens<kThreads>(tile.dout, at<T>(p.dout, batch, here.piece.start, here.query_head, v),
                            p.dout.stride[1], cols, here);
      if (Sizes::kApart) {
        load_state(tile.gradients, p.gradients, here.number, v);
      } else if (!(p.gated && here.first)) {
        prefetch_state(p.gradients, here.number, v);
      }
      commit_copies();
    }
  }
  // A slab of columns of dS, in the memory of S.
  __device__ void start_gradients(const Here& here, int v) const {
    if constexpr (kBoxes) {
      if (threadIdx.x != 0) return;
      arrive_expecting(&tile.barriers->gradients, Tiles::kStateBytes);
      copy_state(tile.gradients, boxes.gradients, here.number, v, &tile.barriers->gradients);
    } else {
      load_state(tile.gradients, p.gradients, here.number, v);
      commit_copies();
    }
  }
  // Queries, by `Threads` threads from the first of a warpgroup on.
  template <int Threads>
  __device__ void start_queries(const Here& here) const {
    if constexpr (kBoxes) {
      if (threadIdx.x % Threads != 0) return;
      arrive_expecting(&tile.barriers->queries, token_rows(here.many_tokens) * D * 2);
      copy_rows(tile.q, boxes.q, here.piece.start, 0, head_of_q(here), here, &tile.barriers->queries);
    } else {
      load_tokens<Threads>(tile.q,
                           at<T>(p.q, here.piece.sequence.batch, here.piece.start, head_of_q(here), 0),
                           p.q.stride[1], p.shape.D, here);
      commit_copies();
    }
  }
  // Prefetches queries to the L2 cache if their memory is still in use.
  __device__ void prefetch_queries(const Here& here) const {
    if constexpr (kBoxes) {
      if (threadIdx.x != 0) return;
#pragma unroll
      for (int col = 0; col < D; col += 64) {
        prefetch_box(boxes.q, {col, static_cast<int>(here.piece.start), head_of_q(here),
                               static_cast<int>(here.piece.sequence.batch)});
      }
    } else {
      constexpr int kLines = D / 64;
      const T* const from = at<T>(p.q, here.piece.sequence.batch, here.piece.start, head_of_q(here), 0);
      const int row = threadIdx.x / kLines, col = threadIdx.x % kLines * 64;
      if (row < here.piece.length && col < p.shape.D) prefetch(from + row * p.q.stride[1] + col);
    }
  }

  // Waits for S and for data that all slabs share; `slab` is the index of the slab.
  __device__ void wait_states(const Here& here, int slab) const {
    if constexpr (kBoxes) {
      wait(&tile.barriers->states, slab & 1);
      wait(&tile.barriers->keys, 0);
      if (here.rows < kDeltaRows) {
        clear_after<kThreads>(tile.k, here.rows, kDeltaRows);
        meet();
      }
    } else {
      wait_copies<1>();
      __syncthreads();
    }
  }
  __device__ void wait_values(const Here& here, int slab) const {
    if constexpr (kBoxes) {
      wait(&tile.barriers->values, slab & 1);
      if (here.rows < kDeltaRows || here.piece.length < token_rows(here.many_tokens)) {
        clear_after<kThreads>(tile.u, here.rows, kDeltaRows);
        clear_after<kThreads>(tile.g, here.rows, kDeltaRows);
        clear_after<kThreads>(tile.dout, here.piece.length, token_rows(here.many_tokens));
        meet();
      }
    } else {
      wait_copies<0>();
      __syncthreads();
    }
  }
  __device__ void wait_gradients(int slab) const {
    if constexpr (kBoxes) {
      wait(&tile.barriers->gradients, slab & 1);
    } else {
      wait_copies<0>();
      __syncthreads();
    }
  }
  // Called once by all threads of the block or of one warpgroup, before their barrier.
  template <int Threads>
  __device__ void wait_queries(const Here& here) const {
    if constexpr (kBoxes) {
      wait(&tile.barriers->queries, 0);
      clear_after<Threads>(tile.q, here.piece.length, token_rows(here.many_tokens));
    } else {
      wait_copies<0>();
    }
  }

 private:
  __device__ int key_head(const Here& here) const { return here.head / p.shape.key_share; }
  __device__ int head_of_q(const Here& here) const { return here.query_head / p.shape.query_share; }

  __device__ static void meet() {
    fence_tiles();
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
  __device__ static void copy_rows(const BlockTile<T, Cols>& tile, const Boxes& boxes, int64_t row, int col,
                                   int head, const Here& here, uint64_t* barrier) {
#pragma unroll
    for (int i = 0; i < Cols; i += 64) {
      copy_box(shared_address(tile.block(i).data), boxes,
               {col + i, static_cast<int>(row), head, static_cast<int>(here.piece.sequence.batch)}, barrier);
    }
  }
  // Calls f(byte offset in shared memory, coordinates) for every box of a slab of columns of a state.
  template <class F>
  __device__ static void for_each_box_of_state(uint32_t number, int v, const F& f) {
#pragma unroll
    for (int i = 0; i < Sizes::kParts; ++i) {
#pragma unroll
      for (int d = 0; d < D; d += 64) {
        f(i * Rows::kBytes + d / 64 * Rows::Block::kBytes, {d, v + 64 * i, 0, static_cast<int>(number)});
      }
    }
  }
  __device__ static void copy_state(unsigned char* to, const Boxes& boxes, uint32_t number, int v,
                                    uint64_t* barrier) {
    for_each_box_of_state(number, v, [&](int further, const BoxPlace& at) {
      copy_box(shared_address(to + further), boxes, at, barrier);
    });
  }

  __device__ void load_state(unsigned char* to, const void* states, uint32_t number, int v) const {
    const DeltaShape& shape = p.shape;
    const T* const from = state_at(static_cast<const T*>(states), shape, uint64_t{number}, v);
#pragma unroll
    for (int i = 0; i < Sizes::kParts; ++i) {
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
                                     const Here& here) {
    const int thread = threadIdx.x % Threads;
    if constexpr (!Sizes::kApart) {
      if (!here.many_tokens) {
        load_async<Threads>(HalfTile<T, Cols>{tile}, from, stride, here.piece.length, cols, thread);
        return;
      }
    }
    load_async<Threads>(tile, from, stride, here.piece.length, cols, thread);
  }
};

}  // namespace girih::kernels::delta_product

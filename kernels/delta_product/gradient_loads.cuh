// What a block of the gradients brings to shared memory, all of its threads together.
#pragma once

#include "delta_product/gradient_tiles.cuh"

namespace girih::kernels::delta_product {

// The first rows of a tile, to be loaded by themselves.
template <typename T, int Cols>
struct HalfTile : BlockTile<T, Cols> {
  static constexpr int kRows = kDeltaRows / 2;
};

// All of the block: starts to load a slab's columns of a state.
template <typename T, int D>
__device__ inline void load_state(unsigned char* to, const void* states, const DeltaShape& shape,
                                  const Here& here, int v) {
  using Rows = BlockTile<T, D>;
  const T* const from = here.state<T>(states, shape, v);
#pragma unroll
  for (int i = 0; i < GradientSizes<D>::kParts; ++i) {
    load_async<GradientSizes<D>::kThreads>(Rows{reinterpret_cast<T*>(to + i * Rows::kBytes)},
                                           from + 64 * i * shape.D, shape.D, shape.V - v - 64 * i, shape.D,
                                           threadIdx.x);
  }
}
// To the L2 cache, where what reads dS for <S, dS> brings it else.
template <typename T, int D>
__device__ inline void prefetch_state(const void* states, const DeltaShape& shape, const Here& here, int v) {
  using Sizes = GradientSizes<D>;
  const int first = threadIdx.x * 64, count = min(Sizes::kSlab, shape.V - v) * shape.D;
  const T* const from = here.state<T>(states, shape, v) + first;
#pragma unroll
  for (int i = 0; i < Sizes::kSlab * D; i += Sizes::kThreads * 64) {
    if (first + i < count) prefetch(from + i);
  }
}
// Rows of tokens, by `Threads` of the block.
template <int Threads, int D, typename T, int Cols>
__device__ inline void load_rows(const BlockTile<T, Cols>& tile, const T* from, int64_t stride, int cols,
                                 const Here& here) {
  const int thread = threadIdx.x % Threads;
  if constexpr (!GradientSizes<D>::kApart) {
    if (!here.many_tokens) {
      load_async<Threads>(HalfTile<T, Cols>{tile}, from, stride, here.piece.length, cols, thread);
      return;
    }
  }
  load_async<Threads>(tile, from, stride, here.piece.length, cols, thread);
}
// And what stands beside them of v, G and do.
template <typename T, int D, bool OneSlab>
__device__ inline void load_values(const DeltaGradients& p, const Here& here,
                                   const GradientTiles<T, D, OneSlab>& tile, int v) {
  using Sizes = GradientSizes<D>;
  const int64_t batch = here.piece.sequence.batch, row = here.piece.start * p.shape.n;
  const int cols = p.shape.V - v;
  load_async<Sizes::kThreads>(tile.u, at<T>(p.v, batch, row, here.head, v), p.v.stride[1], here.rows, cols,
                              threadIdx.x);
  load_async<Sizes::kThreads>(tile.g, at<T>(p.dz, batch, row, here.head, v), p.dz.stride[1], here.rows, cols,
                              threadIdx.x);
  const T* const dout = at<T>(p.dout, batch, here.piece.start, here.query_head, v);
  load_rows<Sizes::kThreads, D>(tile.dout, dout, p.dout.stride[1], cols, here);
}
template <int Threads, typename T, int D, bool OneSlab>
__device__ inline void load_queries(const DeltaGradients& p, const Here& here,
                                    const GradientTiles<T, D, OneSlab>& tile) {
  load_rows<Threads, D>(tile.q, at<T>(p.q, here.piece.sequence.batch, here.piece.start, here.query_head, 0),
                        p.q.stride[1], p.shape.D, here);
}
// To the L2 cache, of queries that come late.
template <typename T, int D>
__device__ inline void prefetch_queries(const DeltaGradients& p, const Here& here) {
  constexpr int kLines = D / 64;
  const T* const from = at<T>(p.q, here.piece.sequence.batch, here.piece.start, here.query_head, 0);
  const int row = threadIdx.x / kLines, col = threadIdx.x % kLines * 64;
  if (row < here.piece.length && col < p.shape.D) prefetch(from + row * p.q.stride[1] + col);
}

}  // namespace girih::kernels::delta_product

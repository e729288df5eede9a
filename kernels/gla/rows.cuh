// dq, and q for the reverse scan. A block has a chunk and a query head; warp w has rows 16 w to 16 w + 15:
//
//     dq_t = scale * S_t do_t
//
// This is a value read of (do, v).
#pragma once

#include "gla/launch.h"
#include "gsa/block.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GlaRowTiles {
  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> k, s;  // s: 64 rows of the state
  SharedTile<T, kChunk, kSlab> v, dout;
  float *totals, *decay, *own;

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 2 * SharedTile<T, kChunk, M>::kBytes +
                                2 * SharedTile<T, kChunk, kSlab>::kBytes + 5 * M * 4 + kChunk * 4;

  __device__ explicit GlaRowTiles(unsigned char* shared) {
    Layout(shared)(g)(k)(s)(v)(dout)(totals, 4 * M)(decay, M)(own, kChunk);
  }
};

template <typename T, int M>
__global__ void __launch_bounds__(kGroup, M == 64 ? 3 : 2)
    gla_rows_kernel(const __grid_constant__ GlaRows p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const GlaRowTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x >> 5;
  const ChunkBlock block(shape, warp);
  const Piece& piece = block.piece;
  if (piece.length == 0) return;

  block.load<kGroup>(tile.g, p.g, block.head, 0, shape.M);
  block.load<kGroup>(tile.k, p.k, block.head, 0, shape.M);
  commit_copies();
  const auto load_slab = [&](int v) {
    block.load<kGroup>(tile.dout, p.dout, block.query_head, v, shape.V);
    block.load<kGroup>(tile.v, p.v, block.head, v, shape.V);
    block.load_states<kGroup>(tile.s, p.states, v, shape.V - v);
    commit_copies();
  };
  load_slab(0);

  wait_copies<1>();
  __syncthreads();
  RowReads<T, M, true> reads;
  // The unscaled keys replace the state.
  reads.at = {{tile.g, tile.decay, tile.totals, warp}, tile.k, tile.s, {rows_of(tile.dout, warp)}};
  reads.template start<4>();
  if (threadIdx.x == 0 && block.leads())
    p.left.factored[block.chunk * shape.heads + block.head] = reads.factored;
  wait_copies<0>();
  __syncthreads();

  // e^L dO S^T + [sum_{j<i} do_i . v_j e^{L_i - L_j} k_j]
  Scores a;
  Sums<M / 8> dq;
  zero(a);
  fill(dq, 0.f);
  each_slab(shape.V, load_slab,
            [&](int) { add_slab<Side::earlier, T>(a, dq, tile.dout, tile.v, tile.s, warp); });
  put_diagonal(tile.own, a, warp);
  __syncwarp();
  reads.template split<kGroup>(tile.s, p.k, {}, piece, block.head, shape.M);
  // The loads of q are in flight during the read. Rows and columns outside of the array are clamped and not
  // stored.
  uint32_t q_pairs[M / 8][2];
  const T* q_rows = chunk_rows<T>(p.q, piece, block.query_head);
  each_pair<M / 8>([&](int n, int i) {
    const int row = min(kRows * warp + lane_row() + 8 * i, piece.length - 1);
    q_pairs[n][i] = *reinterpret_cast<const uint32_t*>(q_rows + row * p.q.stride[1] +
                                                       min(8 * n + lane_col(), shape.M - 2));
  });
  reads.value_read(dq, a);

  // w = q dq without the rows' own tokens, then the remaining terms of dq, and q for the reverse scan.
  const SharedTile<T, kChunk, M> keys{reads.factored ? tile.k.data : tile.s.data};
  float* w_rows = chunk_rows<float>(p.left.w, piece, block.query_head);
  Sums<M / 8> q;
#pragma unroll
  for (int n = 0; n < M / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = kRows * warp + lane_row() + 8 * i, col = 8 * n + lane_col();
      const bool exists = row < piece.length && col < shape.M;
      float2 of_q = unpaired<T>(q_pairs[n][i]);
      of_q.x *= shape.scale, of_q.y *= shape.scale;
      float& left = dq.at[n][2 * i];
      float& right = dq.at[n][2 * i + 1];
      const float2 r = reads.factor(i, n);
      of_q.x *= r.x, of_q.y *= r.y;
      // q as gla_columns reads it: rounded after the multiplication by r, or without factors as it is.
      const float2 seen = reads.factored ? unpaired<T>(pair_of<T>(of_q.x, of_q.y)) : of_q;
      const float2 w = {__fdividef(seen.x * left, r.x), __fdividef(seen.y * right, r.y)};
      if (exists) *reinterpret_cast<float2*>(w_rows + row * p.left.w.stride[1] + col) = w;
      q.at[n][2 * i] = of_q.x, q.at[n][2 * i + 1] = of_q.y;
      float2 k = lane_pair<T>(keys, kRows * warp + 8 * i, 8 * n);
      k = {k.x * r.x, k.y * r.y};
      const float own = tile.own[row];
      left = shape.scale * fmaf(own, k.x, left), right = shape.scale * fmaf(own, k.y, right);
    }
  }
  if (!reads.factored) reads.decay_from_start(q);
  __syncthreads();  // v and do have been read: their tiles are the buffers for the stores
#pragma unroll
  for (int m = 0; m < M; m += kSlab) {
    store_rows<T>(dq, tile.v, warp, p.dq, piece, block.query_head, m, shape.M, 0, m / 8);
    store_rows<T>(q, tile.dout, warp, p.q_scan, piece, block.query_head, m, shape.M, 0, m / 8);
  }
}

template <typename T, int M>
cudaError_t launch_gla_rows(const GlaRows& p, cudaStream_t stream) {
  return launch_blocks<gla_rows_kernel<T, M>>(p, kGroup, GlaRowTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels

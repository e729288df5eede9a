// The gradients of key rows, one block a chunk and query head, warp w with rows 16 w to 16 w + 15. G: what
// later chunks and the final state give to the state after this one.
//
//     dk_j = G_j v_j          dv_j = G_j^T k_j          G_j = e^{L_C - L_j} G + sum_{t>=j} e^{L_t - L_j}
//     scale q_t do_t^T dg_t = sum S * (gradient of S) - sum_{j<t} (q dq - k dk)_j        S before the chunk,
//     without own tokens
//
// As in gsa's columns, of which this is the second memory.
#pragma once

#include "gla/launch.h"
#include "gsa/gradients.cuh"
#include "gsa/writes.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GlaColumnTiles {
  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> k, end, q, gradient;
  SharedTile<T, kChunk, kSlab> v, dout;
  float *totals, *decay, *edge, *own;

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 4 * SharedTile<T, kChunk, M>::kBytes +
                                2 * SharedTile<T, kChunk, kSlab>::kBytes + (4 + 1 + 4) * M * 4 + kChunk * 4;

  __device__ explicit GlaColumnTiles(unsigned char* shared) {
    Layout(shared)(g)(k)(end)(q)(gradient)(v)(dout)(totals, 4 * M)(decay, M)(edge, 4 * M)(own, kChunk);
  }
};

template <typename T, int M>
__global__ void __launch_bounds__(kGsaThreads, 2) gla_columns_kernel(const __grid_constant__ GlaColumns p) {
  constexpr int N = M / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const GlaColumnTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x / 32;
  const int query_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads));
  const int group = shape.query_heads / shape.heads, head = query_head / group;
  const bool first = query_head % group == 0;
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(shape.query_heads);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  load_gates<kGsaThreads>(tile.g, p.g, piece, head, shape.M);
  load_async<kGsaThreads>(tile.k, chunk_rows<T>(p.k, piece, head), p.k.stride[1], piece.length, shape.M,
                          threadIdx.x);
  commit_copies();
  const auto load_slab = [&](int col) {
    const int cols = shape.V - col;
    load_async<kGsaThreads>(tile.v, chunk_rows<T>(p.v, piece, head) + col, p.v.stride[1], piece.length, cols,
                            threadIdx.x);
    load_async<kGsaThreads>(tile.dout, chunk_rows<T>(p.dout, piece, query_head) + col, p.dout.stride[1],
                            piece.length, cols, threadIdx.x);
    load_async<kGsaThreads>(tile.gradient, state_rows<T>(p.gradients, shape, chunk, head, col), shape.M,
                            first ? cols : 0, shape.M, threadIdx.x);
    commit_copies();
  };
  load_async<kGsaThreads>(tile.q, chunk_rows<T>(p.q, piece, query_head), p.q.stride[1], piece.length, shape.M,
                          threadIdx.x);
  load_slab(0);

  wait_copies<1>();
  __syncthreads();
  RowWrites<T, M, true> writes;
  writes.at = {
      {tile.g, tile.decay, tile.totals, warp}, tile.k, tile.end, {rows_of(tile.v, warp)}, 0, shape.scale};
  writes.template start<4>();
  wait_copies<0>();
  __syncthreads();

  // a = V dO^T,   u = V G
  Sums<N> u;  // dk
  EdgeSum<M> edge;
  Scores a;
  fill(u, 0.f);
  zero(a);
  for (int slab = 0;; slab += kSlab) {
#pragma unroll 2
    for (int col = 0; col < kSlab; col += 16) {
      uint32_t v[4];
      load_block(v, tile.v, kRows * warp, col);
      add_scores<Side::later, T>(a, v, tile.dout, col, warp);
      add_product<T>(u, v, tile.gradient, col);
    }
    const int rows = min(kSlab, shape.V - slab);
    if (first && piece.index > 0) {
      edge.add(state_rows<T>(p.states, shape, chunk, head, slab),
               state_rows<T>(p.gradients, shape, chunk - 1, head, slab), rows, shape.M, threadIdx.x);
    } else if (first) {
      edge.add_start(p.initial, p.start, piece, head, slab, rows, shape.M, threadIdx.x);
    }
    if (slab + kSlab >= shape.V) break;
    __syncthreads();
    load_slab(slab + kSlab);
    wait_copies<0>();
    __syncthreads();
  }
  edge.put(tile.edge + warp * M);
  put_diagonal(tile.own, a, warp);
  __syncwarp();
  writes.decay_end(u);

  // u += [a_jt e^{L_t - L_j} scale q_t, t > j],   dV = f G^T + W dO
  Operand<2> w[2];
  writes.write(u, w, a, tile.q);
  for (int col = 0; col < shape.V; col += kSlab) {
    if (shape.V > kSlab) {
      __syncthreads();
      load_slab(col);
      wait_copies<0>();
      __syncthreads();
    }
    Sums<8> dv;
    fill(dv, 0.f);
    add_scored<Side::later, T>(dv, w, tile.dout, warp);
#pragma unroll 2
    for (int m = 0; m < M; m += 16) {
      uint32_t weights[4];
      load_block(weights, tile.end, kRows * warp, m);
      add_product_transposed<T>(dv, weights, tile.gradient, 0, m);
    }
    __syncwarp();
    store_rows_of<T>(dv, tile.v, warp, p.dv, piece, query_head, col, shape.V);
  }

  // dk, and c = q dq - k dk in place of g.
  const T* q_rows = chunk_rows<T>(p.q, piece, query_head);
  const float* w_rows = chunk_rows<float>(p.w, piece, query_head);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = kRows * warp + lane_row() + 8 * i, col = 8 * n + lane_col();
      auto& c = *reinterpret_cast<float2*>(&tile.g.at(row, col));
      float2 dk = {u.at[n][2 * i], u.at[n][2 * i + 1]};
      if (writes.factored) dk = {__fdividef(dk.x, c.x), __fdividef(dk.y, c.y)};  // of e^{-X}
      c = {0.f, 0.f};
      if (row < piece.length && col < shape.M) {
        const float2 k = writes.at.weight(i, n);
        const float2 of_w = *reinterpret_cast<const float2*>(w_rows + row * p.w.stride[1] + col);
        c = {of_w.x - k.x * dk.x, of_w.y - k.y * dk.y};
        const float2 q = unpaired<T>(*reinterpret_cast<const uint32_t*>(q_rows + row * p.q.stride[1] + col));
        const float own = tile.own[row] * shape.scale;
        dk = {fmaf(own, q.x, dk.x), fmaf(own, q.y, dk.y)};
      }
      u.at[n][2 * i] = dk.x, u.at[n][2 * i + 1] = dk.y;
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M; m += kSlab) {
    if (m < shape.M) store_rows_of<T>(u, tile.v, warp, p.dk, piece, query_head, m, shape.M, m / 8);
  }
  put_gate_gradients<kGsaThreads, 4>(tile.g, tile.edge, p.dg, piece, query_head, shape.M,
                                     [](int, int) { return 0.f; });
}

template <typename T, int M>
cudaError_t launch_gla_columns(const GlaColumns& p, cudaStream_t stream) {
  return launch_blocks<gla_columns_kernel<T, M>>(p, kGsaThreads, GlaColumnTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels

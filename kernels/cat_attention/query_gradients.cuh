// dq of a tile of queries, and the records CatQuery for the kernels of keys.
#pragma once

#include "cat_attention/keys.cuh"
#include "cat_attention/launch.h"
#include "cat_attention/products.cuh"
#include "cat_attention/softmax.h"

namespace girih::kernels {

enum CatQueryOperand : int { kCatQ, kCatDout, kCatQueryOperands };

template <typename T, int Tile>
struct CatQueryPass {
  static constexpr int kRows = 16 * kCatWarps, kKeys = kCatGradientKeys<T, Tile>,
                       kUnrolled = kCatUnrolled<T, Tile>;
  using Queries = CatQueryTile<T, Tile, kRows, kCatQueryOperands, kKeys>;
  // O is loaded to the tiles of the second block of keys, or to those of both blocks if one is too small.
  static constexpr bool kSecond = 2 * Queries::KeyRows::kBytes >= Queries::QueryRows::kBytes;
  static_assert(4 * Queries::KeyRows::kBytes >= Queries::QueryRows::kBytes);

  const CatQueryGradients& p;
  const Queries& tile;
  int from;     // first row of the warp in the tile
  float scale;  // multiplied by kCatUnit, as lse
  float lse[2], delta[2];
  Sums<Tile / 8> dq;

  __device__ CatQueryPass(const CatQueryGradients& p, const Queries& tile)
      : p(p), tile(tile), from(16 * warp_index()), scale(p.shape.scale * kCatUnit<T>) {
    fill(dq, 0.f);
  }

  __device__ typename Queries::QueryRows output() const { return {tile.keys(kSecond ? 1 : 0).data}; }

  // delta = sum over V of dO * O; writes the records of the queries.
  __device__ void describe() {
    float sum[2] = {0.f, 0.f};
#pragma unroll 4
    for (int col = 0; col < Tile; col += 16) {
      add_dots(sum, tile.queries(kCatDout), output(), from, col);
    }
    const CatRows rows(tile.seen, from);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      delta[i] = sum_over_row(sum[i]);
      lse[i] = 0.f;
      const int row = from + lane_row() + 8 * i;
      if (row >= tile.plan.rows) continue;
      const int64_t at = offset_of(p.lse, tile.plan.batch, tile.plan.row + row, tile.plan.head);
      lse[i] = static_cast<const float*>(p.lse.data)[at] * kCatUnit<T>;
      if (lane_col() > 0) continue;
      CatQuery* queries = p.queries + (tile.plan.batch * p.shape.query_heads + tile.plan.head) * p.shape.rows;
      queries[tile.plan.row + row] = {lse[i], delta[i], rows.first[i], rows.chunk[i]};
    }
  }

  // S becomes dA = P * (dP - delta), P = e^{scale S - lse}.
  template <int N, class Seen>
  __device__ void gradients(Sums<N>& s, const Sums<N>& dp, const Seen& seen) const {
    each_sum<N>([&](int n, int e) {
      const float weight = cat_weight<T>(s.at[n][e], scale, lse[e >> 1]);
      s.at[n][e] = seen(n, e) ? weight * (dp.at[n][e] - delta[e >> 1]) : 0.f;
    });
  }

  // The rows of the warp's own chunks, in blocks of 16 x 16.
  __device__ void own(int block) {
    const CatWarp warp(tile, from, 16);
    const CatRows rows(tile.seen, from);
    for_own<kKeys>(tile.shape, tile.first_of(block), warp.common, warp.last, [&](int i, int key) {
      Sums<2> s, dp;
      fill(s, 0.f), fill(dp, 0.f);
#pragma unroll kUnrolled
      for (int col = 0; col < Tile; col += 16) {
        CatLeft<T> a;
        a.load(tile.queries(kCatQ), from, col);
        add_scores(s, a, tile.keys(block), 16 * i, col);
        a.load(tile.queries(kCatDout), from, col);
        add_scores(dp, a, tile.values(block), 16 * i, col);
      }
      bool seen[2][4];
      for_pairs(rows, tile.shape, warp.first, key, [&](int n, int e, bool is) { seen[n][e] = is; });
      gradients(s, dp, [&](int n, int e) { return seen[n][e]; });
      add_weighted<T>(dq, s, tile.keys(block), 16 * i);
    });
  }

  // A block of headers. All: all rows attend to all of its headers.
  template <bool All>
  __device__ void headers(int block) {
    Sums<kKeys / 8> s, dp;
    fill(s, 0.f), fill(dp, 0.f);
#pragma unroll kUnrolled
    for (int col = 0; col < Tile; col += 16) {
      CatLeft<T> a;
      a.load(tile.queries(kCatQ), from, col);
      add_scores(s, a, tile.keys(block), 0, col);
    }
#pragma unroll kUnrolled
    for (int col = 0; col < Tile; col += 16) {
      CatLeft<T> a;
      a.load(tile.queries(kCatDout), from, col);
      add_scores(dp, a, tile.values(block), 0, col);
    }
    const CatRows rows(tile.seen, from);
    const int first = tile.first_of(block) + lane_col();
    gradients(s, dp, [&](int n, int e) { return All || rows.header(e >> 1, first + 8 * n + (e & 1)); });
    add_weighted<T>(dq, s, tile.keys(block), 0);
  }

  __device__ void meet(int block) {
    if (from >= tile.plan.rows) return;
    if (tile.is_own(block)) {
      own(block);
      return;
    }
    const CatWarp warp(tile, from, 16);
    const int first = tile.first_of(block);
    if (warp.reads_all(first, kKeys)) {
      headers<true>(block);
    } else if (warp.reads_headers(first, kKeys)) {
      headers<false>(block);
    }
  }

  // Stores dQ = scale dA K through the warp's rows of the queries, which have been read.
  __device__ void store() {
    scale_rows(dq, {p.shape.scale, p.shape.scale});
    put_sums(tile.queries(kCatQ), from, dq);
    __syncwarp();
    store_tile<kCatWarps>(tile.queries(kCatQ),
                          row_of<T>(p.dq, tile.plan.batch, tile.plan.row, tile.plan.head), p.dq.stride[1],
                          tile.plan.rows, p.shape.D, warp_index());
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatThreads)
    cat_query_gradients_kernel(const __grid_constant__ CatQueryGradients p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Pass = CatQueryPass<T, Tile>;
  const typename Pass::Queries tile(p.shape, shared);
  Pass pass(p, tile);
  tile.load_queries(kCatQ, p.q, p.shape.D);
  tile.load_queries(kCatDout, p.dout, p.shape.V);
  load_async<kCatThreads>(pass.output(), row_of<T>(p.o, tile.plan.batch, tile.plan.row, tile.plan.head),
                          p.o.stride[1], tile.plan.rows, p.shape.V, threadIdx.x);
  commit_copies();
  if (Pass::kSecond) tile.load_keys(0, p.k, p.v);
  wait_copies<Pass::kSecond ? 1 : 0>();
  __syncthreads();
  pass.describe();
  __syncthreads();
  if (!Pass::kSecond) tile.load_keys(0, p.k, p.v);
  tile.for_keys(p.k, p.v, [&](int block) { pass.meet(block); });
  pass.store();
}

template <typename T, int Tile>
cudaError_t launch_cat_query_gradients(const CatQueryGradients& p, cudaStream_t stream) {
  using Pass = CatQueryPass<T, Tile>;
  return launch_cat<cat_query_gradients_kernel<T, Tile>>(p, query_blocks(p.shape, Pass::kRows), kCatThreads,
                                                         Pass::Queries::kBytes, stream);
}

}  // namespace girih::kernels

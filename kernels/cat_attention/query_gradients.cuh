// dq of a tile of queries, and the records CatQueryRecord for the kernels of keys.
#pragma once

#include "cat_attention/keys.cuh"
#include "cat_attention/launch.h"
#include "cat_attention/products.cuh"
#include "cat_attention/softmax.h"

namespace girih::kernels {

enum CatQueryOperand : int { kCatQ, kCatDout, kCatQueryOperands };

template <typename T, int Tile>
struct CatQueryMainloop {
  static constexpr int kRows = 16 * kCatWarps, kKeys = kCatGradientKeyBlock<T, Tile>,
                       kUnrolled = kCatUnrolled<T, Tile>;
  using Queries = CatQueryTile<T, Tile, kRows, kCatQueryOperands, kKeys>;
  // O is loaded to the tiles of the second block of keys, or to those of both blocks if one is too small.
  static constexpr bool kFitsSecondBlock = 2 * Queries::KeyRows::kBytes >= Queries::QueryRows::kBytes;
  static_assert(4 * Queries::KeyRows::kBytes >= Queries::QueryRows::kBytes);

  const CatQueryGradients& p;
  const Queries& tile;
  int from;     // first row of the warp in the tile
  float scale;  // multiplied by kCatUnit, as lse
  float lse[2], delta[2];
  Accumulator<Tile / 8> dq;

  __device__ CatQueryMainloop(const CatQueryGradients& p, const Queries& tile)
      : p(p), tile(tile), from(16 * warp_index()), scale(p.shape.scale * kCatUnit<T>) {
    fill(dq, 0.f);
  }

  __device__ typename Queries::QueryRows output() const { return {tile.keys(kFitsSecondBlock ? 1 : 0).data}; }

  // delta = sum over V of dO * O; writes the records of the queries.
  __device__ void store_query_records() {
    float sum[2] = {0.f, 0.f};
#pragma unroll 4
    for (int col = 0; col < Tile; col += 16) {
      add_dots(sum, tile.queries(kCatDout), output(), from, col);
    }
    const CatLaneRows rows(tile.header_ranges, from);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      delta[i] = sum_over_row(sum[i]);
      lse[i] = 0.f;
      const int row = from + lane_row() + 8 * i;
      if (row >= tile.plan.rows) continue;
      const int64_t at = offset_of(p.lse, tile.plan.batch, tile.plan.row + row, tile.plan.head);
      lse[i] = static_cast<const float*>(p.lse.data)[at] * kCatUnit<T>;
      if (lane_col() > 0) continue;
      CatQueryRecord* queries =
          p.queries + (tile.plan.batch * p.shape.query_heads + tile.plan.head) * p.shape.rows;
      queries[tile.plan.row + row] = {lse[i], delta[i], rows.first[i], rows.chunk[i]};
    }
  }

  // S becomes dA = P * (dP - delta), P = e^{scale S - lse}.
  template <int N, class Mask>
  __device__ void gradients(Accumulator<N>& s, const Accumulator<N>& dp, const Mask& mask) const {
    for_each_register<N>([&](int n, int e) {
      const float weight = cat_weight<T>(s.at[n][e], scale, lse[e >> 1]);
      s.at[n][e] = mask(n, e) ? weight * (dp.at[n][e] - delta[e >> 1]) : 0.f;
    });
  }

  // The rows of the warp's own chunks, in blocks of 16 x 16.
  __device__ void attend_own_chunk(int block) {
    const CatWarpRange warp(tile, from, 16);
    const CatLaneRows rows(tile.header_ranges, from);
    for_each_own_block<kKeys>(
        tile.shape, tile.first_key(block), warp.all_end, warp.last, [&](int i, int key) {
          Accumulator<2> s, dp;
          fill(s, 0.f), fill(dp, 0.f);
#pragma unroll kUnrolled
          for (int col = 0; col < Tile; col += 16) {
            CatAFragment<T> a;
            a.load(tile.queries(kCatQ), from, col);
            add_scores(s, a, tile.keys(block), 16 * i, col);
            a.load(tile.queries(kCatDout), from, col);
            add_scores(dp, a, tile.values(block), 16 * i, col);
          }
          bool mask[2][4];
          for_each_score(rows, tile.shape, warp.first, key, [&](int n, int e, bool is) { mask[n][e] = is; });
          gradients(s, dp, [&](int n, int e) { return mask[n][e]; });
          add_weight_product<T>(dq, s, tile.keys(block), 16 * i);
        });
  }

  // A block of headers. All: all rows attend to all of its headers.
  template <bool All>
  __device__ void attend_headers(int block) {
    Accumulator<kKeys / 8> s, dp;
    fill(s, 0.f), fill(dp, 0.f);
#pragma unroll kUnrolled
    for (int col = 0; col < Tile; col += 16) {
      CatAFragment<T> a;
      a.load(tile.queries(kCatQ), from, col);
      add_scores(s, a, tile.keys(block), 0, col);
    }
#pragma unroll kUnrolled
    for (int col = 0; col < Tile; col += 16) {
      CatAFragment<T> a;
      a.load(tile.queries(kCatDout), from, col);
      add_scores(dp, a, tile.values(block), 0, col);
    }
    const CatLaneRows rows(tile.header_ranges, from);
    const int first = tile.first_key(block) + lane_col();
    gradients(s, dp, [&](int n, int e) { return All || rows.header(e >> 1, first + 8 * n + (e & 1)); });
    add_weight_product<T>(dq, s, tile.keys(block), 0);
  }

  __device__ void process_block(int block) {
    if (from >= tile.plan.rows) return;
    if (tile.is_own(block)) {
      attend_own_chunk(block);
      return;
    }
    const CatWarpRange warp(tile, from, 16);
    const int first = tile.first_key(block);
    if (warp.reads_all(first, kKeys)) {
      attend_headers<true>(block);
    } else if (warp.reads_headers(first, kKeys)) {
      attend_headers<false>(block);
    }
  }

  // Stores dQ = scale dA K through the warp's rows of the queries, which have been read.
  __device__ void store() {
    scale_rows(dq, {p.shape.scale, p.shape.scale});
    store_accumulator(tile.queries(kCatQ), from, dq);
    __syncwarp();
    store_tile<kCatWarps>(tile.queries(kCatQ),
                          row_of<T>(p.dq, tile.plan.batch, tile.plan.row, tile.plan.head), p.dq.stride[1],
                          tile.plan.rows, p.shape.D, warp_index());
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatThreads)
    cat_query_gradients_kernel(const __grid_constant__ CatQueryGradients p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  using Mainloop = CatQueryMainloop<T, Tile>;
  const typename Mainloop::Queries tile(p.shape, shared);
  Mainloop mainloop(p, tile);
  tile.load_queries(kCatQ, p.q, p.shape.D);
  tile.load_queries(kCatDout, p.dout, p.shape.V);
  load_async<kCatThreads>(mainloop.output(), row_of<T>(p.o, tile.plan.batch, tile.plan.row, tile.plan.head),
                          p.o.stride[1], tile.plan.rows, p.shape.V, threadIdx.x);
  commit_copies();
  if (Mainloop::kFitsSecondBlock) tile.load_keys(0, p.k, p.v);
  wait_copies<Mainloop::kFitsSecondBlock ? 1 : 0>();
  __syncthreads();
  mainloop.store_query_records();
  __syncthreads();
  if (!Mainloop::kFitsSecondBlock) tile.load_keys(0, p.k, p.v);
  tile.for_each_key_block(p.k, p.v, [&](int block) { mainloop.process_block(block); });
  mainloop.store();
}

template <typename T, int Tile>
cudaError_t launch_cat_query_gradients(const CatQueryGradients& p, cudaStream_t stream) {
  using Mainloop = CatQueryMainloop<T, Tile>;
  return launch_cat<cat_query_gradients_kernel<T, Tile>>(p, count_query_blocks(p.shape, Mainloop::kRows),
                                                         kCatThreads, Mainloop::Queries::kBytes, stream);
}

}  // namespace girih::kernels

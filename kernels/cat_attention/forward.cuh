// o and lse of a tile of queries, by online softmax over blocks of keys.
#pragma once

#include "cat_attention/keys.cuh"
#include "cat_attention/launch.h"
#include "cat_attention/products.cuh"
#include "cat_attention/softmax.h"

namespace girih::kernels {

template <typename T, int Tile>
struct CatForwardMainloop {
  static constexpr int A = kCatQueryTiles<T, Tile>, kRows = 16 * kCatWarps * A, kKeys = kCatKeyBlock<T, Tile>,
                       kHeaders = kCatHeaderStep<Tile>, kUnrolled = kCatUnrolled<T, Tile>;
  using Queries = CatQueryTile<T, Tile, kRows, 1, kKeys>;

  const CatForward& p;
  const Queries& tile;
  int from;  // first row of the warp in the tile
  const CatScale scale;
  Accumulator<Tile / 8> o[A];
  CatSoftmax<T> softmax[A];

  __device__ CatForwardMainloop(const CatForward& p, const Queries& tile)
      : p(p), tile(tile), from(16 * A * warp_index()), scale(p.shape.scale) {
#pragma unroll
    for (int m = 0; m < A; ++m) fill(o[m], 0.f);
  }

  // The rows of the warp's own chunks, in blocks of 16 x 16. With chunks of 16 rows, 16 queries have one
  // block.
  __device__ void attend_own_chunk(int block) {
#pragma unroll
    for (int m = 0; m < A; ++m) {
      if (from + 16 * m >= tile.plan.rows) continue;
      const CatWarpRange warp(tile, from + 16 * m, 16);
      const CatLaneRows rows(tile.header_ranges, from + 16 * m);
      for_each_own_block<kKeys>(
          tile.shape, tile.first_key(block), warp.all_end, warp.last, [&](int i, int key) {
            // S = scale Q K^T
            Accumulator<2> s;
            fill(s, 0.f);
#pragma unroll kUnrolled
            for (int col = 0; col < Tile; col += 16) {
              CatAFragment<T> q;
              q.load(tile.queries(0), from + 16 * m, col);
              q.flip_sign(scale.sign);
              add_scores(s, q, tile.keys(block), 16 * i, col);
            }
            for_each_score(rows, tile.shape, warp.first, key, [&](int n, int e, bool visible) {
              s.at[n][e] = visible ? s.at[n][e] : -INFINITY;
            });
            // O <- e^{m - m'} O + e^{S - m'} V
            rescale_accumulator(o[m], softmax[m].add(s, scale));
            add_weight_product<T>(o[m], s, tile.values(block), 16 * i);
          });
    }
  }

  // kHeaders headers of a block, from row `key` of the block. all: all rows attend to all of these headers.
  __device__ void attend_headers(int block, int key, bool all) {
    Accumulator<kHeaders / 8> s[A];
#pragma unroll
    for (int m = 0; m < A; ++m) fill(s[m], 0.f);
#pragma unroll kUnrolled
    for (int col = 0; col < Tile; col += 16) {
      CatAFragment<T> q[A];
#pragma unroll
      for (int m = 0; m < A; ++m) {
        q[m].load(tile.queries(0), from + 16 * m, col);
        q[m].flip_sign(scale.sign);
      }
      add_scores(s, q, tile.keys(block), key, col);
    }
#pragma unroll
    for (int m = 0; m < A; ++m) {
      if (!all) {
        const CatLaneRows rows(tile.header_ranges, from + 16 * m);
        const int first = tile.first_key(block) + key + lane_col();
        for_each_register<kHeaders / 8>([&](int n, int e) {
          if (!rows.header(e >> 1, first + 8 * n + (e & 1))) s[m].at[n][e] = -INFINITY;
        });
      }
      rescale_accumulator(o[m], softmax[m].add(s[m], scale));
    }
    add_weight_product<T>(o, s, tile.values(block), key);
  }

  __device__ void process_block(int block) {
    if (from >= tile.plan.rows) return;
    if (tile.is_own(block)) {
      attend_own_chunk(block);
      return;
    }
    const CatWarpRange warp(tile, from, 16 * A);
#pragma unroll 1
    for (int key = 0; key < kKeys; key += kHeaders) {
      const int first = tile.first_key(block) + key;
      if (warp.reads_headers(first, kHeaders)) attend_headers(block, key, warp.reads_all(first, kHeaders));
    }
  }

  // o = O / sum; lse = log sum + m
  __device__ void store() {
#pragma unroll
    for (int m = 0; m < A; ++m) {
      if (from + 16 * m >= tile.plan.rows) continue;
      const CatLaneRows rows(tile.header_ranges, from + 16 * m);
      float by[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool inside = rows.first[i] != kCatNoSequence;
        const float sum = sum_over_row(softmax[m].sum[i]);
        by[i] = inside ? 1.f / sum : 0.f;
        const int row = from + 16 * m + lane_row() + 8 * i;
        if (p.lse.data == nullptr || lane_col() > 0 || row >= tile.plan.rows) continue;
        const float lse = inside ? softmax[m].log_sum(i, sum, scale) : INFINITY;
        static_cast<float*>(
            p.lse.data)[offset_of(p.lse, tile.plan.batch, tile.plan.row + row, tile.plan.head)] = lse;
      }
      for_each_register<Tile / 8>(
          [&](int n, int e) { o[m].at[n][e] = by[e >> 1] == 0.f ? 0.f : o[m].at[n][e] * by[e >> 1]; });
      // Only this warp reads the queries of these rows, and has read them.
      store_accumulator(tile.queries(0), from + 16 * m, o[m]);
    }
    __syncwarp();
    store_tile<kCatWarps>(tile.queries(0), row_of<T>(p.o, tile.plan.batch, tile.plan.row, tile.plan.head),
                          p.o.stride[1], tile.plan.rows, p.shape.V, warp_index());
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatThreads) cat_forward_kernel(const __grid_constant__ CatForward p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  using Mainloop = CatForwardMainloop<T, Tile>;
  const typename Mainloop::Queries tile(p.shape, shared);
  tile.load_queries(0, p.q, p.shape.D);
  tile.load_keys(0, p.k, p.v);
  Mainloop mainloop(p, tile);
  tile.for_each_key_block(p.k, p.v, [&](int block) { mainloop.process_block(block); });
  mainloop.store();
}

template <typename T, int Tile>
cudaError_t launch_cat_forward(const CatForward& p, cudaStream_t stream) {
  using Mainloop = CatForwardMainloop<T, Tile>;
  return launch_cat<cat_forward_kernel<T, Tile>>(p, count_query_blocks(p.shape, Mainloop::kRows), kCatThreads,
                                                 Mainloop::Queries::kBytes, stream);
}

}  // namespace girih::kernels

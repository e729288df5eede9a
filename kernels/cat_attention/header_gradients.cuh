// The terms of dk and dv of headers from later chunks. A block of the grid has a run of the list in
// header_list.h and writes a sum for every item of the run.
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/key_tile.cuh"

namespace girih::kernels {

template <typename T, int Tile>
struct CatHeaderMainloop {
  using Keys = CatKeyTile<T, Tile>;
  static constexpr int kQueries = Keys::kQueries, kStep = kCatQueryStep<T, Tile>;

  const CatHeaderGradients& p;
  Keys& tile;
  const CatHeaderRun run;

  __device__ CatHeaderMainloop(const CatHeaderGradients& p, Keys& tile, const CatHeaderRun& run)
      : p(p), tile(tile), run(run) {
    tile.column = run.column;
  }

  __device__ void load(int n, int i) const {
    tile.load_queries(n, p.q, p.dout, p.queries, run.batch, run.row_at(i), run.head_at(p.shape, i));
  }

  __device__ void process_queries(int n, int i) const {
    const int row = run.header + 16 * warp_index(), queries = min(kQueries, p.shape.rows - run.row_at(i));
#pragma unroll 1
    for (int at = 0; at < queries; at += kStep) {
      const int last = min(at + kStep, queries) - 1;
      const CatQueryRecord low = tile.query_records(n)[at], high = tile.query_records(n)[last];
      if (row >= max(low.chunk, high.chunk)) continue;
      const bool all = low.first <= row && high.first <= row && row + 16 <= min(low.chunk, high.chunk);
      if (all && at + kStep <= queries) {
        tile.template add<kStep / 8>(n, at, [](int, int, const CatQueryRecord&) { return true; });
      } else {
        // Queries past the last row attend to no header.
        tile.template add<kStep / 8>(n, at, [&](int half, int, const CatQueryRecord& query) {
          const int h = row + lane_row() + 8 * half;
          return query.first <= h && h < query.chunk;
        });
      }
    }
  }

  __device__ void add() const {
    tile.begin();
    int i = run.next(run.entry);
    if (i == run.entry_end) return;
    tile.load_keys(p.k, p.v, run.batch, int64_t{run.header} * p.shape.size, p.shape.size, run.headers,
                   run.head);
    load(0, i);
    for (int n = 0; i < run.entry_end; ++n) {
      const int next_entry = run.next(i + 1);
      if (next_entry < run.entry_end) {
        load(n + 1, next_entry);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      process_queries(n, i);
      __syncthreads();
      i = next_entry;
    }
  }

  __device__ void store() const {
    float* to = p.partials + run.place + (16 * warp_index() + lane_row()) * Keys::kColumns + lane_col();
    constexpr int kEight = 8 * Keys::kColumns, kValues = kCatBlock * Keys::kColumns;
    for_each_register_pair<Keys::kColumns / 8>([&](int n, int i) {
      float* at = to + i * kEight + 8 * n;
      *reinterpret_cast<float2*>(at) = {tile.dk.at[n][2 * i], tile.dk.at[n][2 * i + 1]};
      *reinterpret_cast<float2*>(at + kValues) = {tile.dv.at[n][2 * i], tile.dv.at[n][2 * i + 1]};
    });
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatThreads)
    cat_header_gradients_kernel(const __grid_constant__ CatHeaderGradients p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  CatKeyTile<T, Tile> tile(p.shape, shared, 2);
  const auto list = [&] { return CatHeaderList(p.shape, Tile, header_list_sizes<T, Tile>()); };
  const int64_t end = min((blockIdx.x + 1) * list().run, list().entries);
  for (int64_t at = blockIdx.x * list().run; at < end;) {
    const CatHeaderMainloop<T, Tile> mainloop(p, tile, CatHeaderRun(p.shape, list(), blockIdx.x, at, end));
    mainloop.add();
    mainloop.store();
    at += mainloop.run.entry_end - mainloop.run.entry;
  }
}

template <typename T, int Tile>
cudaError_t launch_cat_header_gradients(const CatHeaderGradients& p, cudaStream_t stream) {
  return launch_cat<cat_header_gradients_kernel<T, Tile>>(
      p, CatHeaderList(p.shape, Tile, header_list_sizes<T, Tile>()).runs, kCatThreads,
      CatKeyTile<T, Tile>::bytes(2), stream);
}

}  // namespace girih::kernels

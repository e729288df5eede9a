// What headers get of the chunks after their own: a run of the list in header_list.h for every block of the
// grid, and a sum for every item of the run.
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/key_tile.cuh"

namespace girih::kernels {

// The part of an item that a run has: tiles of queries of one head after another's.
template <typename T, int Tile>
struct CatHeaderRun {
  using Keys = CatKeyTile<T, Tile>;
  static constexpr int kQueries = Keys::kQueries, kStep = kCatQueryStep<Tile>;

  const CatHeaderGradients& p;
  Keys& tile;
  int64_t place;     // of its sums
  int batch, head;   // of keys
  int header;        // the block's first
  int from, end;     // rows that read any of them
  int first, tiles;  // of queries that may: the first row, and how many of a head
  int entry, until;  // of the item

  __device__ CatHeaderRun(const CatHeaderGradients& p, Keys& tile) : p(p), tile(tile) {}

  // The item at an entry of the list, as far as the run goes; how many entries these are.
  __device__ int64_t seek(const CatHeaderList& list, int64_t at, int64_t run_end) {
    const int64_t of = at / list.each, inside = at - of * list.each, block = list.block_at(inside);
    place = list.place(blockIdx.x, of * list.blocks + block);
    const int64_t all = of / list.parts;
    batch = static_cast<int>(all / p.shape.heads), head = static_cast<int>(all % p.shape.heads);
    tile.column = static_cast<int>(of % list.parts) * Keys::kColumns;
    header = static_cast<int>(block) * kCatBlock;
    from = (header + 1) * p.shape.size;
    // The last header's sequence ends last; the last chunk of all may lack rows.
    const int64_t last = min(int64_t{header} + kCatBlock, p.shape.chunks.tokens) - 1;
    const Sequence sequence = sequence_of(p.shape.chunks, batch, last);
    end = static_cast<int>(min(sequence.end * p.shape.size, int64_t{p.shape.rows}));
    first = static_cast<int>(list.skip + block * list.step) * kQueries;
    tiles = static_cast<int>(list.of(block) / list.group);
    entry = static_cast<int>(inside - list.before(block));
    until = static_cast<int>(min(list.of(block), entry + run_end - at));
    return until - entry;
  }

  __device__ int row_at(int i) const { return first + i % tiles * kQueries; }
  // Of packed sequences, those that come after the headers' own do not read them.
  __device__ int next(int i) const {
    while (i < until && !(row_at(i) < end && row_at(i) + kQueries > from)) ++i;
    return i;
  }

  __device__ void load(int n, int i) const {
    tile.load_queries(n, p.q, p.dout, p.queries, batch, row_at(i), head * p.shape.group() + i / tiles);
  }

  __device__ void meet(int n, int i) const {
    const int row = header + 16 * warp_index(), queries = min(kQueries, p.shape.rows - row_at(i));
#pragma unroll 1
    for (int at = 0; at < queries; at += kStep) {
      const int last = min(at + kStep, queries) - 1;
      const CatQuery low = tile.described(n)[at], high = tile.described(n)[last];
      if (row >= max(low.chunk, high.chunk)) continue;
      const bool all = low.first <= row && high.first <= row && row + 16 <= min(low.chunk, high.chunk);
      if (all && at + kStep <= queries) {
        tile.template add<kStep / 8>(n, at, [](int, int, const CatQuery&) { return true; });
      } else {
        // A query that is not there reads nothing.
        tile.template add<kStep / 8>(n, at, [&](int half, int, const CatQuery& query) {
          const int h = row + lane_row() + 8 * half;
          return query.first <= h && h < query.chunk;
        });
      }
    }
  }

  __device__ void add() {
    tile.begin();
    int i = next(entry);
    if (i == until) return;
    tile.load_keys(p.k, p.v, batch, int64_t{header} * p.shape.size, p.shape.size,
                   min(static_cast<int>(p.shape.chunks.tokens) - header, kCatBlock), head);
    load(0, i);
    for (int n = 0; i < until; ++n) {
      const int after = next(i + 1);
      if (after < until) {
        load(n + 1, after);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      meet(n, i);
      __syncthreads();
      i = after;
    }
  }

  __device__ void store() const {
    float* to =
        p.partials + place * kCatPlace<Tile> + (16 * warp_index() + lane_row()) * Keys::kColumns + lane_col();
    constexpr int kEight = 8 * Keys::kColumns;
#pragma unroll
    for (int n = 0; n < Keys::kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* at = to + i * kEight + 8 * n;
        *reinterpret_cast<float2*>(at) = {tile.dk.at[n][2 * i], tile.dk.at[n][2 * i + 1]};
        *reinterpret_cast<float2*>(at + kCatPlace<Tile> / 2) = {tile.dv.at[n][2 * i],
                                                                tile.dv.at[n][2 * i + 1]};
      }
    }
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatThreads)
    cat_header_gradients_kernel(const __grid_constant__ CatHeaderGradients p) {
  extern __shared__ __align__(128) unsigned char shared[];
  CatKeyTile<T, Tile> tile(p.shape, shared, 2);
  CatHeaderRun<T, Tile> run(p, tile);
  const CatHeaderList list = header_list<Tile>(p.shape);
  const int64_t end = min((blockIdx.x + 1) * list.run, list.total);
  for (int64_t at = blockIdx.x * list.run; at < end;) {
    at += run.seek(header_list<Tile>(p.shape), at, end);
    run.add();
    run.store();
  }
}

template <typename T, int Tile>
cudaError_t launch_cat_header_gradients(const CatHeaderGradients& p, cudaStream_t stream) {
  return launch_cat<cat_header_gradients_kernel<T, Tile>>(p, header_list<Tile>(p.shape).runs, kCatThreads,
                                                          CatKeyTile<T, Tile>::bytes(2), stream);
}

}  // namespace girih::kernels

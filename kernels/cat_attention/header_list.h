// What later chunks give headers, as one list: every block of headers of every head of keys with every tile
// of queries that reads it. Blocks of a grid take runs of it, all of one length, and leave a sum for every
// item that their run touches: an item is a block of headers of a head, and of its columns where these are
// too many for one.
//
// Headers 64 b to 64 b + 63 are read from row (64 b + 1) C on, which is in tile b step + skip of Q rows, with
// step = 64 C / Q and skip = C / Q rounded down: Q divides 64. So block b has A - b step tiles of a head of
// queries, A = tiles - skip. A list hangs on sizes alone, and so do its sums, on whatever card.
#pragma once

#include "cat_attention/cat_attention.h"
#include "cat_attention/tiles.h"
#include "tile/grid.h"

namespace girih::kernels {

// Two blocks on each of 132 multiprocessors. A run is worth its start from so many tiles on.
constexpr int64_t kCatRuns = 264, kCatShortestRun = 8;

struct CatHeaderList {
  int64_t tiles, skip, step;  // of queries
  int64_t group, parts;       // heads of queries, and of columns, of a head of keys
  int64_t blocks;             // of headers that are read
  int64_t each;               // entries of a head of keys and a part of its columns
  int64_t items, total, run, runs;

  __host__ __device__ CatHeaderList(const CatShape& shape, int queries, int parts)
      : tiles(divide_up(shape.rows, queries)),
        skip(shape.size / queries),
        step(int64_t{shape.size} * (kCatBlock / queries)),
        group(shape.group()),
        parts(parts) {
    blocks = tiles > skip ? divide_up(tiles - skip, step) : 0;
    each = before(blocks);
    const int64_t heads = shape.chunks.batch * shape.heads * parts;
    items = heads * blocks, total = heads * each;
    run = divide_up(total, kCatRuns);
    if (run < kCatShortestRun) run = kCatShortestRun;
    runs = divide_up(total, run);
  }

  // Entries of a block of headers, and of those before it, of one head of keys.
  __host__ __device__ int64_t of(int64_t block) const { return group * (tiles - skip - block * step); }
  __host__ __device__ int64_t before(int64_t block) const {
    return group * (block * (tiles - skip) - step * (block * (block - 1) / 2));
  }
  // The last block with entries at or before this one.
  __host__ __device__ int64_t block_at(int64_t entry) const {
    int64_t low = 0, high = blocks - 1;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (before(middle) <= entry) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  // Where an item's sum of a run lies: from one pair that meet to the next, one of the two grows.
  __host__ __device__ int64_t place(int64_t run_, int64_t item) const { return run_ + item; }
  __host__ __device__ int64_t places() const { return runs + items; }
};

template <int Tile>
__host__ __device__ inline CatHeaderList header_list(const CatShape& shape) {
  return CatHeaderList(shape, kCatQueries<Tile>, Tile / kCatColumns<Tile>);
}

// A place: [2, 64, columns] in fp32, of dk and of dv.
template <int Tile>
constexpr int kCatPlace = 2 * kCatBlock* kCatColumns<Tile>;

}  // namespace girih::kernels

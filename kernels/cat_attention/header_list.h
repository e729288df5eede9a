// What later chunks give headers, as one list: every block of headers of every head of keys with every tile
// of queries that reads it. Blocks of a grid take runs of it, all of one length, and leave a sum for every
// item that their run touches: an item is a block of headers of a head, and of its columns where these are
// too many for one.
//
// Of blocks of N headers, those from N b on are read from row (N b + 1) C on, which is in tile b step + skip
// of Q rows, with step = N C / Q and skip = C / Q rounded down: Q divides N. So block b has A - b step tiles
// of a head of queries, A = tiles - skip.
#pragma once

#include "cat_attention/cat_attention.h"
#include "cat_attention/tiles.h"
#include "tile/grid.h"

namespace girih::kernels {

// A run is worth its start from so many tiles on.
constexpr int64_t kCatShortestRun = 8;

// How a list is made. Runs: the blocks that 132 multiprocessors hold, on whatever card, so that sums are the
// same on all.
struct CatHeaderTiles {
  int headers, queries, columns, runs;
};
template <typename T, int Tile>
__host__ __device__ constexpr CatHeaderTiles header_tiles() {
  return {kCatBlock, kCatQueries<T, Tile>, kCatColumns<Tile>, 264};
}

// Of warpgroups, which take 128 headers: a block of theirs fills a multiprocessor.
template <int Tile>
__host__ __device__ constexpr CatHeaderTiles group_header_tiles() {
  return {128, 64, Tile, 132};
}

struct CatHeaderList {
  int64_t tiles, skip, step;  // of queries
  int64_t group, parts;       // heads of queries, and of columns, of a head of keys
  int64_t blocks;             // of headers that are read
  int64_t each;               // entries of a head of keys and a part of its columns
  int64_t items, total, run, runs;

  int headers, queries, columns;

  __host__ __device__ CatHeaderList(const CatShape& shape, int widest, const CatHeaderTiles& of)
      : tiles(divide_up(shape.rows, of.queries)),
        skip(shape.size / of.queries),
        step(int64_t{shape.size} * (of.headers / of.queries)),
        group(shape.group()),
        parts(widest / of.columns),
        headers(of.headers),
        queries(of.queries),
        columns(of.columns) {
    blocks = tiles > skip ? divide_up(tiles - skip, step) : 0;
    each = before(blocks);
    const int64_t heads = shape.chunks.batch * shape.heads * parts;
    items = heads * blocks, total = heads * each;
    run = divide_up(total, of.runs);
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
  // Where an item's sums of a run lie, dk [headers, columns] and then dv, in fp32: from one pair that meet to
  // the next, one of the two grows.
  __host__ __device__ int64_t place(int64_t run_, int64_t item) const { return (run_ + item) * size(); }
  __host__ __device__ int64_t size() const { return 2 * int64_t{headers} * columns; }
  __host__ __device__ int64_t numbers() const { return (runs + items) * size(); }
};

// The part of an item that a run has: tiles of queries of one head after another's.
struct CatHeaderRun {
  int batch, head;              // of keys
  int header, headers, column;  // the item's first header, how many there are, and the first of its columns
  int from, end;                // rows that read any of them
  int first, tiles, queries;  // of tiles of queries that may: the first row, how many of a head, rows of each
  int entry, until;           // of the item
  int64_t place;              // of its sums

  // The item at an entry of the list, as far as the run goes.
  __device__ CatHeaderRun(const CatShape& shape, const CatHeaderList& list, int64_t run, int64_t at,
                          int64_t run_end)
      : queries(list.queries) {
    const int64_t of = at / list.each, inside = at - of * list.each, block = list.block_at(inside);
    place = list.place(run, of * list.blocks + block);
    const int64_t all = of / list.parts;
    batch = static_cast<int>(all / shape.heads), head = static_cast<int>(all % shape.heads);
    column = static_cast<int>(of % list.parts) * list.columns;
    header = static_cast<int>(block) * list.headers;
    headers = min(static_cast<int>(shape.chunks.tokens) - header, list.headers);
    from = (header + 1) * shape.size;
    // The last header's sequence ends last; the last chunk of all may lack rows.
    const Sequence sequence = sequence_of(shape.chunks, batch, header + headers - 1);
    end = static_cast<int>(min(sequence.end * shape.size, int64_t{shape.rows}));
    first = static_cast<int>(list.skip + block * list.step) * queries;
    tiles = static_cast<int>(list.of(block) / list.group);
    entry = static_cast<int>(inside - list.before(block));
    until = static_cast<int>(min(list.of(block), entry + run_end - at));
  }

  __device__ int row_at(int i) const { return first + i % tiles * queries; }
  __device__ int head_at(const CatShape& shape, int i) const { return head * shape.group() + i / tiles; }
  // The first entry from i on whose queries read the headers: of packed sequences, those that come after the
  // headers' own do not.
  __device__ int next(int i) const {
    while (i < until && !(row_at(i) < end && row_at(i) + queries > from)) ++i;
    return i;
  }
};

}  // namespace girih::kernels

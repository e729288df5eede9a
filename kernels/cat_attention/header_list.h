// The work of the header gradients as one list: each entry is a block of headers of a key head, with a tile
// of queries that attends to it. A block of the grid has a run of the list; all runs have the same length. A
// run writes a sum for every item that it touches. An item is a block of headers of a key head, and a part of
// its columns if one block does not hold all columns.
//
// With blocks of N headers, the first row that attends to the headers from N b is row (N b + 1) C. This row
// is in tile b step + skip of Q rows, with step = N C / Q and skip = C / Q rounded down; Q divides N. So
// block b has A - b step tiles of a query head, A = tiles - skip.
#pragma once

#include "cat_attention/cat_attention.h"
#include "cat_attention/tiles.h"
#include "tile/cuts.h"
#include "tile/grid.h"

namespace girih::kernels {

// Minimum length of a run, in tiles; shorter runs do not pay for their start.
constexpr int64_t kCatMinRunTiles = 8;

// The sizes of a list. runs: the number of blocks that fit on an H100 or H200, independent of the device,
// so that sums are the same on all devices.
struct CatHeaderListSizes {
  int headers, queries, columns, runs;
};
template <typename T, int Tile>
__host__ __device__ constexpr CatHeaderListSizes header_list_sizes() {
  return {kCatBlock, kCatQueries<T, Tile>, kCatColumns<Tile>, 2 * kH100Multiprocessors};
}

// For the warpgroup kernel, which has blocks of 128 headers; one block fills a multiprocessor.
template <int Tile>
__host__ __device__ constexpr CatHeaderListSizes sm90_header_list_sizes() {
  return {128, 64, Tile, kH100Multiprocessors};
}

struct CatHeaderList {
  int64_t tiles, skip, step;  // of queries: number of tiles; skip and step as above
  int64_t group, parts;       // query heads, and parts of the columns, for each key head
  int64_t blocks;             // number of blocks of headers that any query attends to
  int64_t each;               // entries for each key head and part of its columns
  int64_t items, entries, run, runs;

  int headers, queries, columns;

  __host__ __device__ CatHeaderList(const CatShape& shape, int columns_of_tile, const CatHeaderListSizes& of)
      : tiles(divide_up(shape.rows, of.queries)),
        skip(shape.size / of.queries),
        step(int64_t{shape.size} * (of.headers / of.queries)),
        group(shape.group()),
        parts(columns_of_tile / of.columns),
        headers(of.headers),
        queries(of.queries),
        columns(of.columns) {
    blocks = tiles > skip ? divide_up(tiles - skip, step) : 0;
    each = before(blocks);
    const int64_t heads = shape.chunks.batch * shape.heads * parts;
    items = heads * blocks, entries = heads * each;
    run = divide_up(entries, of.runs);
    if (run < kCatMinRunTiles) run = kCatMinRunTiles;
    runs = divide_up(entries, run);
  }

  // of(): entries of a block of headers; before(): entries of the blocks before it; of one key head.
  __host__ __device__ int64_t of(int64_t block) const { return group * (tiles - skip - block * step); }
  __host__ __device__ int64_t before(int64_t block) const {
    return group * (block * (tiles - skip) - step * (block * (block - 1) / 2));
  }
  // The last block whose entries start at or before this entry.
  __host__ __device__ int64_t find_block(int64_t entry) const {
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
  // Offset of the sums of an item in a run, in fp32: dk [headers, columns], then dv. From one pair (run,
  // item) of the list to the next, either the run or the item increases.
  __host__ __device__ int64_t place(int64_t run_, int64_t item) const { return (run_ + item) * size(); }
  __host__ __device__ int64_t size() const { return 2 * int64_t{headers} * columns; }
  __host__ __device__ int64_t float_count() const { return (runs + items) * size(); }
};

// The part of an item in a run: tiles of queries of one query head after the other.
struct CatHeaderRun {
  int batch, head;              // key head
  int header, headers, column;  // first header of the item, number of headers, first column
  int from, end;                // rows that attend to any of the headers
  int first, tiles, queries;  // first row of the tiles of queries that may attend to them, number of tiles of
                              // a query head, rows of a tile
  int entry, entry_end;       // entries of the item
  int64_t place;              // offset of its sums

  // The item at entry `at` of the list, up to the end of the run.
  __device__ CatHeaderRun(const CatShape& shape, const CatHeaderList& list, int64_t run, int64_t at,
                          int64_t run_end)
      : queries(list.queries) {
    const int64_t of = at / list.each, inside = at - of * list.each, block = list.find_block(inside);
    place = list.place(run, of * list.blocks + block);
    const int64_t all = of / list.parts;
    batch = static_cast<int>(all / shape.heads), head = static_cast<int>(all % shape.heads);
    column = static_cast<int>(of % list.parts) * list.columns;
    header = static_cast<int>(block) * list.headers;
    headers = min(static_cast<int>(shape.chunks.tokens) - header, list.headers);
    from = (header + 1) * shape.size;
    // The sequence of the last header ends last. The last chunk of a batch row may be incomplete.
    const Sequence sequence = sequence_of(shape.chunks, batch, header + headers - 1);
    end = static_cast<int>(min(sequence.end * shape.size, int64_t{shape.rows}));
    first = static_cast<int>(list.skip + block * list.step) * queries;
    tiles = static_cast<int>(list.of(block) / list.group);
    entry = static_cast<int>(inside - list.before(block));
    entry_end = static_cast<int>(min(list.of(block), entry + run_end - at));
  }

  __device__ int row_at(int i) const { return first + i % tiles * queries; }
  __device__ int head_at(const CatShape& shape, int i) const { return head * shape.group() + i / tiles; }
  // The first entry from i whose queries attend to the headers. With packed sequences, queries of later
  // sequences do not.
  __device__ int next(int i) const {
    while (i < entry_end && !(row_at(i) < end && row_at(i) + queries > from)) ++i;
    return i;
  }
};

}  // namespace girih::kernels

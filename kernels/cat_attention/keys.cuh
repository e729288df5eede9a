// A tile of queries and the blocks of keys that it attends to: first the rows of the tile's own chunks, so
// that every row has a finite maximum after the first block, then headers.
#pragma once

#include "cat_attention/kernels.h"
#include "cat_attention/tiles.h"
#include "tile/matrix.h"
#include "tile/pack.h"

namespace girih::kernels {

template <typename T>
__device__ inline const T* row_of(const InputTensor<4>& x, int64_t batch, int64_t row, int head) {
  return static_cast<const T*>(x.data) + offset_of(x, batch, row, head);
}
template <typename T>
__device__ inline T* row_of(const OutputTensor<4>& x, int64_t batch, int64_t row, int head) {
  return static_cast<T*>(x.data) + offset_of(x, batch, row, head);
}

// A row attends to the headers from `first` to before `chunk`, its own chunk.
struct CatHeaderRange {
  int first, chunk;
};
constexpr int kCatNoSequence = 0x7fffffff;  // `first` of rows outside of all sequences

__device__ inline CatHeaderRange find_header_range(const CatShape& shape, int64_t batch, int row) {
  const int chunk = row / shape.size;
  const Sequence sequence = sequence_of(shape.chunks, batch, chunk);
  return {sequence.is_owned ? static_cast<int>(sequence.start) : kCatNoSequence, chunk};
}

// The position of a tile of queries and the keys that it attends to. In shared memory, to save registers.
struct CatPlan {
  int batch, head;         // batch row and query head
  int row, rows;           // first row, number of rows
  int own, header;         // first row of the own chunks, first header
  int header_end;          // one past the last header
  int own_blocks, blocks;  // blocks of own rows, and all blocks of keys
};

// Shared memory of a block: `Queries` tiles [Rows, Tile] of a query head, two pairs of tiles of keys and
// values, and a CatHeaderRange for every query.
template <typename T, int Tile, int Rows, int Queries, int Keys>
struct CatQueryTile {
  static constexpr int kKeys = Keys;
  using QueryRows = SharedTile<T, Rows, Tile>;
  using KeyRows = SharedTile<T, kKeys, Tile>;
  static constexpr int kTiles = Queries * QueryRows::kBytes + 4 * KeyRows::kBytes;
  static constexpr int kBytes = kTiles + static_cast<int>(Rows * sizeof(CatHeaderRange) + sizeof(CatPlan));

  const CatShape& shape;
  unsigned char* shared;
  CatHeaderRange* header_ranges;  // [Rows]
  CatPlan& plan;

  // The last tiles of a batch row have more keys than the others, so they are scheduled first.
  __device__ CatQueryTile(const CatShape& shape, unsigned char* shared)
      : shape(shape),
        shared(shared),
        header_ranges(reinterpret_cast<CatHeaderRange*>(shared + kTiles)),
        plan(*reinterpret_cast<CatPlan*>(header_ranges + Rows)) {
    const auto heads = static_cast<unsigned>(shape.query_heads),
               all = heads * static_cast<unsigned>(shape.chunks.batch), of = blockIdx.x % all;
    const int batch = static_cast<int>(of / heads),
              row = ((shape.rows + Rows - 1) / Rows - 1 - static_cast<int>(blockIdx.x / all)) * Rows,
              rows = min(Rows, shape.rows - row);
    for (int i = threadIdx.x; i < Rows; i += kCatThreads)
      header_ranges[i] = find_header_range(shape, batch, row + i);
    __syncthreads();
    if (threadIdx.x == 0) {
      const CatHeaderRange first = header_ranges[0], last = header_ranges[rows - 1];
      // Blocks of 16 keys are aligned like blocks of 16 queries, so that a chunk of 16 rows is one product.
      const int own = first.chunk * shape.size / 16 * 16, own_blocks = (row + rows - own + kKeys - 1) / kKeys;
      const int header = min(first.first, first.chunk), header_end = max(last.chunk, header);
      const int blocks = own_blocks + (header_end - header + kKeys - 1) / kKeys;
      plan = {batch, static_cast<int>(of % heads), row, rows, own, header, header_end, own_blocks, blocks};
    }
    __syncthreads();
  }

  __device__ QueryRows queries(int which) const {
    return {reinterpret_cast<T*>(shared + which * QueryRows::kBytes)};
  }
  __device__ KeyRows keys(int block) const {
    return {reinterpret_cast<T*>(shared + Queries * QueryRows::kBytes + block % 2 * 2 * KeyRows::kBytes)};
  }
  __device__ KeyRows values(int block) const { return {keys(block).data + KeyRows::kRows * Tile}; }

  __device__ bool is_own(int block) const { return block < plan.own_blocks; }
  // The first row of a block of own rows, or the first header of a block of headers.
  __device__ int first_key(int block) const {
    return is_own(block) ? plan.own + block * kKeys : plan.header + (block - plan.own_blocks) * kKeys;
  }

  __device__ void load_queries(int which, const InputTensor<4>& x, int width) const {
    load_async<kCatThreads>(queries(which), row_of<T>(x, plan.batch, plan.row, plan.head), x.stride[1],
                            plan.rows, width, threadIdx.x);
  }
  // Headers are the rows of a matrix with a row stride of C rows.
  __device__ void load_keys(int block, const InputTensor<4>& k, const InputTensor<4>& v) const {
    const int from = first_key(block),
              count = (is_own(block) ? plan.row + plan.rows : plan.header_end) - from;
    const int64_t row_step = is_own(block) ? 1 : shape.size, first = from * row_step;
    const int of = plan.head / shape.group();
    load_async<kCatThreads>(keys(block), row_of<T>(k, plan.batch, first, of), row_step * k.stride[1], count,
                            shape.D, threadIdx.x);
    load_async<kCatThreads>(values(block), row_of<T>(v, plan.batch, first, of), row_step * v.stride[1], count,
                            shape.V, threadIdx.x);
    commit_copies();
  }

  // Calls f(block) for every block after its copies are complete. The caller has started the copies of the
  // first block.
  template <class F>
  __device__ void for_each_key_block(const InputTensor<4>& k, const InputTensor<4>& v, const F& f) const {
    for (int block = 0; block < plan.blocks; ++block) {
      if (block + 1 < plan.blocks) {
        load_keys(block + 1, k, v);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      f(block);
      __syncthreads();
    }
  }
};

// The headers that a lane's two of 16 rows attend to; the 16 rows start at `row` of a tile.
struct CatLaneRows {
  int first[2], chunk[2];

  CatLaneRows() = default;
  __device__ CatLaneRows(const CatHeaderRange* header_ranges, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const CatHeaderRange of = header_ranges[row + lane_row() + 8 * i];
      first[i] = of.first, chunk[i] = of.chunk;
    }
  }
  // Whether row lane_row() + 8 i attends to header n.
  __device__ bool header(int i, int n) const { return first[i] <= n && n < chunk[i]; }
};

// The headers that `count` rows of a tile attend to, from row `from`; one or more of the rows exist.
struct CatWarpRange {
  int first, last;         // first and last row in the tensor
  int any_begin, any_end;  // headers that any row attends to: least..most-1
  int every, all_end;      // headers that all rows attend to: every..common-1

  template <class Tile>
  __device__ CatWarpRange(const Tile& tile, int from, int count) {
    const int to = min(from + count, tile.plan.rows) - 1;
    const CatHeaderRange low = tile.header_ranges[from], high = tile.header_ranges[to];
    first = tile.plan.row + from, last = tile.plan.row + to;
    any_begin = min(low.first, low.chunk), any_end = high.chunk;
    every = max(low.first, high.first), all_end = low.chunk;
  }
  __device__ bool reads_headers(int from, int count) const {
    return from < any_end && from + count > any_begin;
  }
  __device__ bool reads_all(int from, int count) const { return from >= every && from + count <= all_end; }
};

// Calls f(i, key) for the blocks of 16 keys whose rows the queries up to row `last` attend to in their own
// chunks: i is the index in the block of keys, key the first row.
template <int Keys, class F>
__device__ inline void for_each_own_block(const CatShape& shape, int from, int chunk, int last, const F& f) {
  const int start = chunk * shape.size;
#pragma unroll 1
  for (int i = 0; i < Keys / 16; ++i) {
    const int key = from + 16 * i;
    if (key + 15 >= start && key <= last) f(i, key);
  }
}

// Calls f(n, e, header_ranges) for every element s.at[n][e] of the scores of 16 queries, from `row`, with 16
// rows of their own chunks, from `key`. header_ranges: whether the query attends to the key.
template <class F>
__device__ inline void for_each_score(const CatLaneRows& rows, const CatShape& shape, int row, int key,
                                      const F& f) {
  for_each_register<2>([&](int n, int e) {
    const int i = e >> 1, t = row + lane_row() + 8 * i, j = key + 8 * n + lane_col() + (e & 1);
    f(n, e, rows.chunk[i] * shape.size <= j && j <= t);
  });
}

}  // namespace girih::kernels

// Tiles of 128 queries one after another, by as many blocks as there are multiprocessors, and the blocks of
// headers that each reads. Who loads them says in shared memory what those who multiply have before them.
#pragma once

#include "cat_attention/keys.cuh"
#include "cat_attention/sm90/launch.h"

namespace girih::kernels {

struct CatGroupPlan {
  int batch, head, row;  // of queries
  int header;            // the first that any row reads
  int blocks, whole;     // of headers; those that every row reads whole come first in memory
  int shift;             // chunks that fill tiles are powers of two: of 1 << shift rows

  __device__ static unsigned items(const CatShape& shape) {
    return static_cast<unsigned>((shape.rows + kCatGroupRows - 1) / kCatGroupRows) *
           static_cast<unsigned>(shape.query_heads) * static_cast<unsigned>(shape.chunks.batch);
  }

  // The order in which they are met: first those of which some rows read some.
  __device__ int parts() const { return blocks - whole; }
  __device__ int chunk_of(int row) const { return row >> shift; }
  __device__ int first_of(int met) const {
    return header + (met < parts() ? whole + met : met - parts()) * kCatGroupKeys;
  }
};

// In shared memory.
struct CatGroupTile {
  CatGroupPlan plan;
  int first[kCatGroupRows];  // header that a chunk of the tile reads, as CatSeen has it

  // By a warp. Items count from the tiles that read most; the heads of a tile are beside each other.
  __device__ CatGroupPlan describe(const CatShape& shape, unsigned item) {
    CatGroupPlan of;
    const auto heads = static_cast<unsigned>(shape.query_heads),
               all = heads * static_cast<unsigned>(shape.chunks.batch), tile = item / all,
               rest = item - tile * all;
    of.batch = static_cast<int>(rest / heads);
    of.head = static_cast<int>(rest) - of.batch * shape.query_heads;
    of.row = ((shape.rows + kCatGroupRows - 1) / kCatGroupRows - 1 - static_cast<int>(tile)) * kCatGroupRows;
    for (of.shift = 0; 1 << of.shift < shape.size;) ++of.shift;
    const int chunk = of.chunk_of(of.row), last = of.chunk_of(min(of.row + kCatGroupRows, shape.rows) - 1);
#pragma unroll 1
    for (int i = lane(); i <= last - chunk; i += 32) {
      const Sequence sequence = sequence_of(shape.chunks, of.batch, chunk + i);
      first[i] = sequence.inside ? static_cast<int>(sequence.start) : kCatOutside;
    }
    __syncwarp();
    const int from = first[0];
    of.header = min(from, chunk);
    of.blocks = (last - of.header + kCatGroupKeys - 1) / kCatGroupKeys;
    // Where sequences meet in a tile, no block is read whole.
    of.whole = from == first[last - chunk] && from != kCatOutside ? (chunk - of.header) / kCatGroupKeys : 0;
    if (lane() == 0) plan = of;
    __syncwarp();
    return of;
  }

  // By another warp: the same for all lanes, in a way that tells the compiler.
  __device__ CatGroupPlan read() const {
    const auto same = [](int x) { return __shfl_sync(~0u, x, 0); };
    return {same(plan.batch),  same(plan.head),  same(plan.row),  same(plan.header),
            same(plan.blocks), same(plan.whole), same(plan.shift)};
  }
  // What the lane's two rows of sixteen, from row `from` of the tile on, read.
  __device__ CatRows rows(const CatShape& shape, const CatGroupPlan& of, int from) const {
    CatRows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(of.row + from + lane_row() + 8 * i, shape.rows - 1);
      rows.chunk[i] = of.chunk_of(row);
      rows.first[i] = first[rows.chunk[i] - of.chunk_of(of.row)];
    }
    return rows;
  }
};

}  // namespace girih::kernels

// Plans of tiles of 128 queries and of the blocks of headers that each tile attends to. The kernels are
// persistent: one block for each multiprocessor processes several tiles. The loader computes the plan of a
// tile and passes it to the other warps in shared memory.
#pragma once

#include "cat_attention/keys.cuh"
#include "cat_attention/sm90/launch.h"

namespace girih::kernels {

struct CatGroupPlan {
  int batch, head, row;  // batch row, query head and first row
  int header;            // first header that any row attends to
  int blocks, whole;  // blocks of headers; `whole` of these, the first in memory, are not masked for any row
  int shift;          // log2 of C, which is a power of two

  __device__ static unsigned items(const CatShape& shape) {
    return static_cast<unsigned>((shape.rows + kCatGroupRows - 1) / kCatGroupRows) *
           static_cast<unsigned>(shape.query_heads) * static_cast<unsigned>(shape.chunks.batch);
  }

  // Partly masked blocks; these are processed first.
  __device__ int parts() const { return blocks - whole; }
  __device__ int chunk_of(int row) const { return row >> shift; }
  __device__ int first_of(int met) const {
    return header + (met < parts() ? whole + met : met - parts()) * kCatGroupKeys;
  }
};

// The plan of a tile in shared memory.
struct CatGroupTile {
  CatGroupPlan plan;
  int first[kCatGroupRows];  // for each chunk of the tile: `first` of CatSeen

  // Called by one warp. Items are ordered by the number of keys, the largest first; the heads of a tile are
  // adjacent.
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
    // A tile with several sequences has no unmasked block.
    of.whole = from == first[last - chunk] && from != kCatOutside ? (chunk - of.header) / kCatGroupKeys : 0;
    if (lane() == 0) plan = of;
    __syncwarp();
    return of;
  }

  // Called by another warp; the result is warp-uniform for the compiler.
  __device__ CatGroupPlan read() const {
    const auto same = [](int x) { return __shfl_sync(~0u, x, 0); };
    return {same(plan.batch),  same(plan.head),  same(plan.row),  same(plan.header),
            same(plan.blocks), same(plan.whole), same(plan.shift)};
  }
  // The headers that the lane's two of 16 rows attend to; the 16 rows start at row `from` of the tile.
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

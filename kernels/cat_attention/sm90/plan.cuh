// Tiles of 128 queries one after another, by as many blocks as there are multiprocessors, and the blocks of
// headers that each reads. Who loads them and who multiplies them both count.
#pragma once

#include "cat_attention/keys.cuh"
#include "cat_attention/sm90/launch.h"

namespace girih::kernels {

struct CatGroupPlan {
  int batch, head, row;    // of queries
  int header, header_end;  // that any row reads
  int blocks, whole;       // of headers; those that every row reads whole come first in memory

  // Items count from the tiles that read most; the heads of a tile are beside each other.
  __device__ CatGroupPlan(const CatShape& shape, unsigned item) {
    const auto heads = static_cast<unsigned>(shape.query_heads),
               all = heads * static_cast<unsigned>(shape.chunks.batch), of = item % all;
    batch = static_cast<int>(of / heads), head = static_cast<int>(of % heads);
    row =
        ((shape.rows + kCatGroupRows - 1) / kCatGroupRows - 1 - static_cast<int>(item / all)) * kCatGroupRows;
    const CatSeen first = cat_seen(shape, batch, row),
                  last = cat_seen(shape, batch, min(row + kCatGroupRows, shape.rows) - 1);
    header = min(first.first, first.chunk), header_end = max(last.chunk, header);
    blocks = (header_end - header + kCatGroupKeys - 1) / kCatGroupKeys;
    // Where sequences meet in a tile, no block is read whole.
    whole =
        first.first == last.first && first.first != kCatOutside ? (first.chunk - header) / kCatGroupKeys : 0;
  }
  __device__ static unsigned items(const CatShape& shape) {
    return static_cast<unsigned>((shape.rows + kCatGroupRows - 1) / kCatGroupRows) *
           static_cast<unsigned>(shape.query_heads) * static_cast<unsigned>(shape.chunks.batch);
  }

  // The order in which they are met: first those of which some rows read some.
  __device__ int parts() const { return blocks - whole; }
  __device__ int first_of(int met) const {
    return header + (met < parts() ? whole + met : met - parts()) * kCatGroupKeys;
  }
};

}  // namespace girih::kernels

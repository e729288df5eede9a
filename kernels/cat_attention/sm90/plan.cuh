// Plans of tiles of 128 queries and of the blocks of headers that each tile attends to. The kernels are
// persistent: one block for each multiprocessor processes several tiles. The loader computes the plan of a
// tile and passes it to the other warps in shared memory.
#pragma once

#include "cat_attention/keys.cuh"
#include "cat_attention/sm90/launch.h"

namespace girih::kernels {

struct CatSm90TilePlan {
  int batch, head, row;         // batch row, query head and first row
  int header;                   // first header that any row attends to
  int blocks, unmasked_blocks;  // blocks of headers; the first unmasked_blocks of these in memory are not
                                // masked for any row
  int log2_chunk;               // log2 of C, which is a power of two

  __device__ static unsigned tile_count(const CatShape& shape) {
    return static_cast<unsigned>((shape.rows + kCatSm90Rows - 1) / kCatSm90Rows) *
           static_cast<unsigned>(shape.query_heads) * static_cast<unsigned>(shape.chunks.batch);
  }

  // Partly masked blocks; these are processed first.
  __device__ int masked_blocks() const { return blocks - unmasked_blocks; }
  __device__ int chunk_index(int row) const { return row >> log2_chunk; }
  __device__ int first_header(int block_order) const {
    return header +
           (block_order < masked_blocks() ? unmasked_blocks + block_order : block_order - masked_blocks()) *
               kCatSm90Keys;
  }
};

// The plan of a tile in shared memory.
struct CatSm90Tile {
  CatSm90TilePlan plan;
  int first[kCatSm90Rows];  // for each chunk of the tile: `first` of CatHeaderRange

  // Called by one warp. Items are ordered by the number of keys, the largest first; the heads of a tile are
  // adjacent.
  __device__ CatSm90TilePlan compute_plan(const CatShape& shape, unsigned item) {
    CatSm90TilePlan of;
    const auto heads = static_cast<unsigned>(shape.query_heads),
               all = heads * static_cast<unsigned>(shape.chunks.batch), tile = item / all,
               rest = item - tile * all;
    of.batch = static_cast<int>(rest / heads);
    of.head = static_cast<int>(rest) - of.batch * shape.query_heads;
    of.row = ((shape.rows + kCatSm90Rows - 1) / kCatSm90Rows - 1 - static_cast<int>(tile)) * kCatSm90Rows;
    for (of.log2_chunk = 0; 1 << of.log2_chunk < shape.size;) ++of.log2_chunk;
    const int chunk = of.chunk_index(of.row),
              last = of.chunk_index(min(of.row + kCatSm90Rows, shape.rows) - 1);
#pragma unroll 1
    for (int i = lane(); i <= last - chunk; i += 32) {
      const Sequence sequence = sequence_of(shape.chunks, of.batch, chunk + i);
      first[i] = sequence.is_owned ? static_cast<int>(sequence.start) : kCatNoSequence;
    }
    __syncwarp();
    const int from = first[0];
    of.header = min(from, chunk);
    of.blocks = (last - of.header + kCatSm90Keys - 1) / kCatSm90Keys;
    // A tile with several sequences has no unmasked block.
    of.unmasked_blocks =
        from == first[last - chunk] && from != kCatNoSequence ? (chunk - of.header) / kCatSm90Keys : 0;
    if (lane() == 0) plan = of;
    __syncwarp();
    return of;
  }

  // Called by another warp; the result is warp-uniform for the compiler.
  __device__ CatSm90TilePlan read() const {
    const auto broadcast = [](int x) { return __shfl_sync(~0u, x, 0); };
    return {broadcast(plan.batch),     broadcast(plan.head),   broadcast(plan.row),
            broadcast(plan.header),    broadcast(plan.blocks), broadcast(plan.unmasked_blocks),
            broadcast(plan.log2_chunk)};
  }
  // The headers that the lane's two of 16 rows attend to; the 16 rows start at row `from` of the tile.
  __device__ CatLaneRows rows(const CatShape& shape, const CatSm90TilePlan& of, int from) const {
    CatLaneRows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(of.row + from + lane_row() + 8 * i, shape.rows - 1);
      rows.chunk[i] = of.chunk_index(row);
      rows.first[i] = first[rows.chunk[i] - of.chunk_index(of.row)];
    }
    return rows;
  }
};

}  // namespace girih::kernels

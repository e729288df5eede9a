// The tensors that the load warps of a block read in every chunk, as a list in shared memory.
//
// The warps of a multiprocessor share an instruction cache of about 32 KB. If the loops of all warp roles do
// not fit, the state warps, which determine the time of a chunk, wait for instructions most of the time. The
// other roles therefore use loops instead of unrolled code, and load warps loop over this list.
#pragma once

#include "tile/matrix.h"
#include "tile/pack.h"
#include "tile/shared.h"

namespace girih::kernels {

// Rows of `cols` elements (a multiple of 8), `stride` elements apart. `tile` is the index of their tile in a
// stage.
template <typename T>
struct RowSource {
  const T* from;
  int64_t stride;
  int cols, tile;

  // Starts the copies of `rows` rows from row `first`, by one warp; further rows of the tile become zero.
  template <class Tile>
  __device__ void load(const Tile& tile, int64_t first, int rows) const {
    load_async<32>(tile, from + first * stride, stride, rows, cols, lane());
  }
};

// The rows of one batch row and head of a tensor [B, T, H, X] of 16-bit elements; row 0 is token 0.
template <typename T, class Array>
__device__ inline RowSource<T> row_source(const Array& x, int64_t batch, int64_t head, int cols, int tile) {
  return {static_cast<const T*>(x.data) + offset_of(x, batch, int64_t{0}, head), x.stride[1], cols, tile};
}

}  // namespace girih::kernels

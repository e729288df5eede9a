// Rows that a block's loaders bring again and again, listed once in shared memory.
//
// The warps of a block share the multiprocessor's cache of instructions, about 32 KB. Where the loops of all
// its roles do not fit, a chain that has the time of one chunk after another waits for its own instructions
// most of that time. So what is not the chain is a loop wherever it can be, and loaders go through a list.
#pragma once

#include "tile/array.h"
#include "tile/matrix.h"
#include "tile/shared.h"

namespace girih::kernels {

// `cols` elements of every row, a multiple of 8, rows `stride` elements apart: to the place `to` of a stage.
template <typename T>
struct RowSource {
  const T* from;
  int64_t stride;
  int cols, to;

  // By a warp: starts to load `rows` rows, from row `first` on; zeros beyond them.
  template <class Tile>
  __device__ void bring(const Tile& tile, int64_t first, int rows) const {
    load_async<32>(tile, from + first * stride, stride, rows, cols, lane());
  }
};

// The rows of a batch's head in [B, T, H, X], 16-bit elements: row 0 is token 0.
template <typename T, class Array>
__device__ inline RowSource<T> row_source(const Array& x, int64_t batch, int64_t head, int cols, int to) {
  return {static_cast<const T*>(x.data) + offset_of(x, batch, int64_t{0}, head), x.stride[1], cols, to};
}

}  // namespace girih::kernels

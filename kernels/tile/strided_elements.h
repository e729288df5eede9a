// Access to the elements of an accumulator in a matrix with arbitrary strides, one element at a time.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

// Calls f(element, pointer) for the lane's accumulator elements that lie within a matrix of rows x cols
// elements at `first`. The lane's first element is at (row, col); fragment(n) returns its fragment elements
// of columns 8n..8n+7. Pointers are advanced from element to element: with separate address
// computations, instruction-cache misses of code that runs once took a tenth of a scan's time at 32 chunks.
template <int N, int Unroll = N, class Element, class Fragment, class F>
__device__ inline void for_each_strided_element(const Fragment& fragment, int row, int rows, int col,
                                                int cols, Element* first, int64_t row_stride,
                                                int64_t col_stride, const F& f) {
  const int cols_left = cols - col;
  const bool has_row[2] = {row < rows, row + 8 < rows};
  first += col * col_stride + row * row_stride;
  Element* next = first + col_stride;
#pragma unroll Unroll
  for (int n = 0; n < N; ++n) {
    float(&x)[4] = fragment(n);
    if (has_row[0] && 8 * n < cols_left) f(x[0], first[0]);
    if (has_row[0] && 8 * n + 1 < cols_left) f(x[1], next[0]);
    if (has_row[1] && 8 * n < cols_left) f(x[2], first[8 * row_stride]);
    if (has_row[1] && 8 * n + 1 < cols_left) f(x[3], next[8 * row_stride]);
    first += 8 * col_stride, next += 8 * col_stride;
  }
}

}  // namespace girih::kernels

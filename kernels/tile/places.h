// Access to the elements of an accumulator in a matrix with arbitrary strides, one element at a time.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

// Calls f(element, pointer) for the lane's accumulator elements that lie within a matrix of rows x cols
// elements at `first`. The lane's first element is at (row, col); four(n) returns its four elements of
// columns 8n..8n+7. Pointers are advanced from element to element: separate address computations fetched many
// instructions that run once, which took a tenth of a scan's time at 32 chunks.
template <int N, int Unroll = N, class Place, class Four, class F>
__device__ inline void for_each_place(const Four& four, int row, int rows, int col, int cols, Place* first,
                                      int64_t by_row, int64_t by_col, const F& f) {
  const int left = cols - col;
  const bool has[2] = {row < rows, row + 8 < rows};
  first += col * by_col + row * by_row;
  Place* next = first + by_col;
#pragma unroll Unroll
  for (int n = 0; n < N; ++n) {
    float(&x)[4] = four(n);
    if (has[0] && 8 * n < left) f(x[0], first[0]);
    if (has[0] && 8 * n + 1 < left) f(x[1], next[0]);
    if (has[1] && 8 * n < left) f(x[2], first[8 * by_row]);
    if (has[1] && 8 * n + 1 < left) f(x[3], next[8 * by_row]);
    first += 8 * by_col, next += 8 * by_col;
  }
}

}  // namespace girih::kernels

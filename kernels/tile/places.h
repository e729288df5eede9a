// Elements of sums and the places where they lie one by one, in an array of any strides.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

// f(element, its place) for those of sums' elements that exist, in an array of `rows` by `cols` from `first`
// on. The lane's first has place (row, col), four(n) has its four of the n-th eight columns. Places move on
// from one to the next: with each worked out by itself, a block's end waited for instructions that are run
// once, a tenth of a scan's time at 32 chunks.
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

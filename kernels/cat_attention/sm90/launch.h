// The kernels of warpgroups (sm_90a), for calls whose chunks fill tiles of 128 rows and whose columns fit in
// 128. Each takes its call where the card has them, and says so.
#pragma once

#include <cuda_runtime_api.h>

#include "cat_attention/cat_attention.h"
#include "pipe/card.h"
#include "tile/boxes.h"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {

constexpr int kCatGroupRows = 128;  // of a tile of queries: 64 of a warpgroup
constexpr int kCatGroupKeys = 64;   // headers of a block
constexpr int kCatGroupWidest = 128;

// Whether there are kernels of warpgroups.
template <typename T, int Tile>
constexpr bool kCatHasGroups = sizeof(T) == 2 && Tile <= kCatGroupWidest;

// Tiles of queries of all heads.
__host__ __device__ inline int64_t query_tiles(const CatShape& shape) {
  return divide_up(shape.rows, kCatGroupRows) * shape.chunks.batch * shape.query_heads;
}

// Chunks that lie in one tile each: what a row reads of its own is in its tile. So C is a power of two.
__host__ __device__ inline bool cat_fills_groups(const CatShape& shape) {
  return kCatGroupRows % shape.size == 0 && shape.D <= kCatGroupWidest && shape.V <= kCatGroupWidest &&
         query_tiles(shape) <= 0x7fffffff;
}

// Where the kernel of dq has what a chunk's rows give each other: chunks lie in sixteens of rows, and no
// other head of queries adds to them. Of chunks of two, the headers' shares would be as much memory as k and
// v.
__host__ __device__ inline bool cat_joins(const CatShape& shape) {
  return cat_fills_groups(shape) && shape.group() == 1 && 4 <= shape.size && shape.size <= 16;
}
// The headers' shares [B, H, K, 2, Tile] lie behind the sums.
template <int Tile>
__host__ __device__ inline int64_t cat_shares(const CatShape& shape) {
  return cat_joins(shape) ? shape.chunks.batch * shape.heads * shape.chunks.tokens * 2 * Tile : 0;
}

template <typename T, int Tile>
cudaError_t try_cat_group_forward(const CatForward& problem, cudaStream_t stream, bool& taken);

template <typename T, int Tile>
cudaError_t try_cat_group_query_gradients(const CatQueryGradients& problem, cudaStream_t stream, bool& taken);

// Whether the card has the kernel; who reads its sums asks too. It takes what fits its columns.
template <typename T, int Tile>
cudaError_t has_cat_group_headers(bool& has);
template <typename T, int Tile>
cudaError_t launch_cat_group_header_gradients(const CatHeaderGradients& problem, cudaStream_t stream);

// Headers' dk and dv, from their shares and the sums.
template <typename T, int Tile>
cudaError_t launch_cat_join(const CatOwnGradients& problem, cudaStream_t stream);

// Boxes of so many rows of a head of x [B, rows, H, width], `apart` rows from one to the next.
inline cudaError_t describe_rows(Boxes& boxes, const In<4>& x, const CatShape& shape, int64_t rows,
                                 int64_t apart, int heads, int width, int box) {
  In<4> view = x;
  view.stride[1] *= apart;
  return describe(boxes, view, {shape.chunks.batch, rows, heads, width}, box);
}
// A tile's rows, and a block of headers.
inline cudaError_t describe_tile(Boxes& boxes, const In<4>& x, const CatShape& shape, int heads, int width) {
  return describe_rows(boxes, x, shape, shape.rows, 1, heads, width, kCatGroupRows);
}
inline cudaError_t describe_headers(Boxes& boxes, const In<4>& x, const CatShape& shape, int width) {
  return describe_rows(boxes, x, shape, shape.chunks.tokens, shape.size, shape.heads, width, kCatGroupKeys);
}

}  // namespace girih::kernels

// The warpgroup kernels (sm_90a), for calls whose chunks fill tiles of 128 rows and whose D and V are at most
// 128. The try_ functions set `taken` if the device has the kernel and the kernel serves the call.
#pragma once

#include <cuda_runtime_api.h>

#include "cat_attention/cat_attention.h"
#include "pipe/card.h"
#include "tile/boxes.h"
#include "tile/grid.h"
#include "tile/launch.h"

namespace girih::kernels {

constexpr int kCatGroupRows = 128;  // rows of a tile of queries: 64 for each warpgroup
constexpr int kCatGroupKeys = 64;   // headers of a block of keys
constexpr int kCatGroupWidest = 128;

// Whether warpgroup kernels exist for these types and tiles.
template <typename T, int Tile>
constexpr bool kCatHasGroups = sizeof(T) == 2 && Tile <= kCatGroupWidest;

// Number of tiles of queries of all heads.
__host__ __device__ inline int64_t query_tiles(const CatShape& shape) {
  return divide_up(shape.rows, kCatGroupRows) * shape.chunks.batch * shape.query_heads;
}

// Whether each chunk is within one tile, so that a row attends to own rows of its tile only. C is then a
// power of two.
__host__ __device__ inline bool cat_fills_groups(const CatShape& shape) {
  return kCatGroupRows % shape.size == 0 && shape.D <= kCatGroupWidest && shape.V <= kCatGroupWidest &&
         query_tiles(shape) <= 0x7fffffff;
}

// Whether the kernel of dq also computes the own-chunk terms of dk and dv: chunks are within 16 rows, and one
// query head uses a key head. With chunks of two rows, the shares of headers would need as much memory as k
// and v.
__host__ __device__ inline bool cat_joins(const CatShape& shape) {
  return cat_fills_groups(shape) && shape.group() == 1 && 4 <= shape.size && shape.size <= 16;
}
// Floats of the shares of headers [B, H, K, 2, Tile], which are behind the sums in `partials`.
template <int Tile>
__host__ __device__ inline int64_t cat_shares(const CatShape& shape) {
  return cat_joins(shape) ? shape.chunks.batch * shape.heads * shape.chunks.tokens * 2 * Tile : 0;
}

template <typename T, int Tile>
cudaError_t try_cat_group_forward(const CatForward& problem, cudaStream_t stream, bool& taken);

template <typename T, int Tile>
cudaError_t try_cat_group_query_gradients(const CatQueryGradients& problem, cudaStream_t stream, bool& taken);

// Whether the device has the kernel; the kernels that read its sums check this too. The kernel serves every
// call whose D and V fit in its tile.
template <typename T, int Tile>
cudaError_t has_cat_group_headers(bool& has);
template <typename T, int Tile>
cudaError_t launch_cat_group_header_gradients(const CatHeaderGradients& problem, cudaStream_t stream);

// dk and dv of headers, from their shares and the sums.
template <typename T, int Tile>
cudaError_t launch_cat_join(const CatOwnGradients& problem, cudaStream_t stream);

// Tensor map for boxes of `box` rows of a head of x [B, rows, H, width], with a row stride of `apart` rows.
inline cudaError_t describe_rows(Boxes& boxes, const In<4>& x, const CatShape& shape, int64_t rows,
                                 int64_t apart, int heads, int width, int box) {
  In<4> view = x;
  view.stride[1] *= apart;
  return describe(boxes, view, {shape.chunks.batch, rows, heads, width}, box);
}
// Tensor maps for the rows of a tile, and for a block of headers.
inline cudaError_t describe_tile(Boxes& boxes, const In<4>& x, const CatShape& shape, int heads, int width) {
  return describe_rows(boxes, x, shape, shape.rows, 1, heads, width, kCatGroupRows);
}
inline cudaError_t describe_headers(Boxes& boxes, const In<4>& x, const CatShape& shape, int width) {
  return describe_rows(boxes, x, shape, shape.chunks.tokens, shape.size, shape.heads, width, kCatGroupKeys);
}

}  // namespace girih::kernels

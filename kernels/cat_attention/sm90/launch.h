// The warpgroup kernels (sm_90a), for 16-bit elements and D and V of at most 128.
#pragma once

#include <cuda_runtime_api.h>

#include "cat_attention/kernels.h"
#include "pipe/device.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/tma.h"

namespace girih::kernels {

constexpr int kCatSm90Rows = 128;  // rows of a tile of queries: 64 for each warpgroup
constexpr int kCatSm90Keys = 64;   // headers of a block of keys
constexpr int kCatSm90MaxWidth = 128;

// Whether warpgroup kernels exist for these types and tiles.
template <typename T, int Tile>
constexpr bool kHasCatSm90 = sizeof(T) == 2 && Tile <= kCatSm90MaxWidth;

// Number of tiles of queries of all heads.
__host__ __device__ inline int64_t count_query_tiles(const CatShape& shape) {
  return divide_up(shape.rows, kCatSm90Rows) * shape.chunks.batch * shape.query_heads;
}

// Whether there are rows and each chunk is within one tile, so that a row attends to own rows of its tile
// only. C is then a power of two.
__host__ __device__ inline bool cat_fills_sm90_tiles(const CatShape& shape) {
  return kCatSm90Rows % shape.size == 0 && shape.D <= kCatSm90MaxWidth && shape.V <= kCatSm90MaxWidth &&
         0 < count_query_tiles(shape) && count_query_tiles(shape) <= 0x7fffffff;
}

// Whether the kernel of dq also computes the own-chunk terms of dk and dv: chunks are within 16 rows, and one
// query head uses a key head. With chunks of two rows, the shares of headers would need as much memory as k
// and v.
__host__ __device__ inline bool cat_has_fused_own_gradients(const CatShape& shape) {
  return cat_fills_sm90_tiles(shape) && shape.group() == 1 && 4 <= shape.size && shape.size <= 16;
}
// Floats of the shares of headers [B, H, K, 2, Tile], which follow the sums in `partials` of the call.
template <int Tile>
__host__ __device__ inline int64_t cat_shares_size(const CatShape& shape) {
  return cat_has_fused_own_gradients(shape)
             ? shape.chunks.batch * shape.heads * shape.chunks.tokens * 2 * Tile
             : 0;
}

// Whether the device has the warpgroup kernels. All are compiled for the same architectures.
template <typename T, int Tile>
cudaError_t has_cat_sm90(bool& has);

// For chunks that fill tiles (cat_fills_sm90_tiles()).
template <typename T, int Tile>
cudaError_t launch_cat_forward_sm90(const CatForward& call, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_cat_query_gradients_sm90(const CatQueryGradients& call, cudaStream_t stream);

// For all calls whose D and V fit in the tile.
template <typename T, int Tile>
cudaError_t launch_cat_header_gradients_sm90(const CatHeaderGradients& call, cudaStream_t stream);

// dk and dv of headers, from their shares and the sums.
template <typename T, int Tile>
cudaError_t launch_cat_sum_headers(const CatOwnGradients& call, cudaStream_t stream);

// Tensor map for boxes of `box` rows of a head of x [B, rows, H, width], with a row stride of
// `row_step` rows.
inline cudaError_t describe_rows(TensorMap& boxes, const InputTensor<4>& x, const CatShape& shape,
                                 int64_t rows, int64_t row_step, int heads, int width, int box) {
  InputTensor<4> view = x;
  view.stride[1] *= row_step;
  return encode_tensor_map(boxes, view, {shape.chunks.batch, rows, heads, width}, box);
}
// Tensor maps for the rows of a tile, and for a block of headers.
inline cudaError_t describe_tile(TensorMap& boxes, const InputTensor<4>& x, const CatShape& shape, int heads,
                                 int width) {
  return describe_rows(boxes, x, shape, shape.rows, 1, heads, width, kCatSm90Rows);
}
inline cudaError_t describe_headers(TensorMap& boxes, const InputTensor<4>& x, const CatShape& shape,
                                    int width) {
  return describe_rows(boxes, x, shape, shape.chunks.tokens, shape.size, shape.heads, width, kCatSm90Keys);
}

}  // namespace girih::kernels

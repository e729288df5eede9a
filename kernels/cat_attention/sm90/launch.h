// The kernels of warpgroups (sm_90a), for calls whose chunks fill tiles of 128 rows and whose columns fit in
// 128. Each takes its call where the card has them, and says so.
#pragma once

#include <cuda_runtime_api.h>

#include "cat_attention/cat_attention.h"
#include "tile/boxes.h"
#include "tile/launch.h"

namespace girih::kernels {

constexpr int kCatGroupRows = 128;  // of a tile of queries: 64 of a warpgroup
constexpr int kCatGroupWidest = 128;

// Chunks that lie in one tile each: what a row reads of its own is in its tile. So C is a power of two.
__host__ __device__ inline bool cat_fills_groups(const CatShape& shape) {
  return kCatGroupRows % shape.size == 0 && shape.D <= kCatGroupWidest && shape.V <= kCatGroupWidest;
}

template <typename T, int Tile>
cudaError_t try_cat_group_forward(const CatForward& problem, cudaStream_t stream, bool& taken);

// Multiprocessors of the current device.
inline cudaError_t multiprocessors(int& count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

// Boxes of so many rows of a head of x [B, rows, H, width], `apart` rows from one to the next.
inline cudaError_t describe_rows(Boxes& boxes, const In<4>& x, const CatShape& shape, int64_t rows,
                                 int64_t apart, int heads, int width, int box) {
  In<4> view = x;
  view.stride[1] *= apart;
  return describe(boxes, view, {shape.chunks.batch, rows, heads, width}, box);
}

}  // namespace girih::kernels

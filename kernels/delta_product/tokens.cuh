// Rows of a chunk's tokens: as many as it has steps, or of several steps a token half a tile.
#pragma once

#include "delta_product/chain.cuh"
#include "tile/warpgroup.h"

namespace girih::kernels::delta_product {

// More tokens than half a tile has rows.
__host__ __device__ constexpr bool has_many(int tokens) { return tokens > kDeltaRows / 2; }

// The first rows of a tile, to be loaded by themselves.
template <typename T, int Cols>
struct HalfTile : BlockTile<T, Cols> {
  static constexpr int kRows = kDeltaRows / 2;
};

}  // namespace girih::kernels::delta_product

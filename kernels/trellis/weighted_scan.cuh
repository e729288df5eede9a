// The scan with a weight of phi.
#pragma once

#include "trellis/scan.cuh"

namespace girih::kernels {

template <typename T, int Tile>
cudaError_t launch_weighted_scan(const TrellisScan& p, cudaStream_t stream) {
  if constexpr (TrellisScanStorage<T, Tile>::kHasLookahead) {
    if (p.shape.grid.size <= kTile) return launch_scan_of<T, Tile, WeightedActivationMap, true>(p, stream);
  }
  return launch_scan_of<T, Tile, WeightedActivationMap, false>(p, stream);
}

}  // namespace girih::kernels

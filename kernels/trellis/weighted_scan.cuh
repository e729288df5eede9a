// The scan with a weight of phi.
#pragma once

#include "trellis/scan.cuh"

namespace girih::kernels {

template <typename T, int Width>
cudaError_t launch_weighted_scan(const TrellisScan& p, cudaStream_t stream) {
  if constexpr (TrellisScanStorage<T, Width>::kHasLookahead) {
    if (p.shape.grid.size <= kTokenTile)
      return launch_scan_instance<T, Width, WeightedActivationMap, true>(p, stream);
  }
  return launch_scan_instance<T, Width, WeightedActivationMap, false>(p, stream);
}

}  // namespace girih::kernels

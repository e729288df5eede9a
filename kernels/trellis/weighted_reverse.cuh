// The reverse scan with a weight of phi.
#pragma once

#include "trellis/reverse.cuh"

namespace girih::kernels {

template <typename T, int Width>
cudaError_t launch_weighted_reverse(const TrellisReverse& p, cudaStream_t stream) {
  return launch_reverse_instance<T, Width, WeightedActivationMap>(p, stream);
}

}  // namespace girih::kernels

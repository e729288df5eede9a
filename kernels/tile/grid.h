// Jobs to blocks: kernels walk their jobs with the stride of the grid, so that no tensor is too large for a
// launch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace girih::kernels {

__host__ __device__ constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// gridDim.x is at most 2^31 - 1.
inline unsigned blocks_for(int64_t blocks) {
  return static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff));
}

}  // namespace girih::kernels

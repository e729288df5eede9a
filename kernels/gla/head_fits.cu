// gla_head_fits and head_gradient_tile. Separate translation unit, so that the kernels are not instantiated
// here.
#include <algorithm>

#include "gla/head_gradients.cuh"
#include "gla/head_read.cuh"

namespace girih::kernels {

namespace {
using T = __half;  // same size as bf16
}

cudaError_t gla_head_fits(int D, bool& fits) {
  const int read = D <= 64    ? head_read_bytes<T, 64>(1, 1, 1)
                   : D <= 128 ? head_read_bytes<T, 128>(1, 1, 1)
                              : head_read_bytes<T, 256>(1, 1, 1);
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  fits = std::max(read, HeadGradientTiles<T, 64>::kBytes) <= limit;
  return cudaSuccess;
}

// At most 128 keys: a thread has no registers for more gradients.
cudaError_t head_gradient_tile(int D, int& tile) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  tile = D <= 64 || HeadGradientTiles<T, 128>::kBytes > limit ? 64 : 128;
  return cudaSuccess;
}

}  // namespace girih::kernels

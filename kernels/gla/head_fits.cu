// Away from the launches: whoever sees the kernels and launches them compiles them.
#include <algorithm>

#include "gla/head_gradients.cuh"
#include "gla/head_read.cuh"

namespace girih::kernels {

cudaError_t head_fits(int D, bool& fits) {
  using T = __half;  // as large as bf16
  const int read = D <= 64    ? kLeastHeadReadBytes<T, 64>
                   : D <= 128 ? kLeastHeadReadBytes<T, 128>
                              : kLeastHeadReadBytes<T, 256>;
  const int gradients = D <= 64 ? HeadGradientTiles<T, 64>::kBytes : HeadGradientTiles<T, 128>::kBytes;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  fits = std::max(read, gradients) <= limit;
  return cudaSuccess;
}

}  // namespace girih::kernels

// Away from the launches: whoever sees the kernels and launches them compiles them.
#include <algorithm>

#include "delta_product/prepare.cuh"
#include "delta_product/scan.cuh"

namespace girih::kernels {

cudaError_t delta_fits(int D, bool& fits) {
  using namespace delta_product;
  using T = __half;  // as large as bf16
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int scan = D <= 64 ? scan_least<64>() : D <= 128 ? scan_least<128>() : scan_least<256>();
  fits = std::max(scan, kPrepareWarps * PrepareSpace<T>::kBytes) <= limit;
  return cudaSuccess;
}

}  // namespace girih::kernels

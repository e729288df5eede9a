// gsa_fits. Separate translation unit, so that the kernels are not instantiated here.
#include <algorithm>

#include "gsa/dkv.cuh"
#include "gsa/dq.cuh"
#include "gsa/output.cuh"
#include "tile/instance.h"

namespace girih::kernels {

cudaError_t gsa_fits(int M, bool& fits) {
  const auto shared_bytes = [](auto slots) {
    using T = __half;  // same size as bf16
    return std::max({GsaOutputTiles<T, slots()>::kBytes, GsaDqTiles<T, slots()>::kBytes,
                     GatedDkvTiles<T, slots(), 2>::kBytes});
  };
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  fits = (M <= 64 ? shared_bytes(Constant<64>()) : shared_bytes(Constant<128>())) <= limit;
  return cudaSuccess;
}

}  // namespace girih::kernels

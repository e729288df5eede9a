// delta_fits, in a translation unit of its own, so that others do not instantiate the kernels.
#include <algorithm>

#include "delta_product/gradients.cuh"
#include "delta_product/prepare.cuh"
#include "delta_product/reverse.cuh"
#include "delta_product/scan.cuh"
#include "delta_product/vector_gradients.cuh"
#include "tile/instance.h"

namespace girih::kernels {

cudaError_t delta_fits(int D, bool vector, bool& fits) {
  using namespace delta_product;
  using T = __half;  // same size as bf16
  fits = false;
  if (D > kDeltaMaxWidth) return cudaSuccess;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return by_width<64, 128, kDeltaMaxWidth>(D, [&](auto width) {
    constexpr int kWidth = width();
    int bytes = std::max({scan_least<T, kWidth>(), ReverseSpace<T, kWidth, kDeltaRows>::bytes(1, 1),
                          gradients_least<T, kWidth>(), PrepareSpace<T, 1>::kBlockBytes});
    if constexpr (kWidth <= kDeltaVectorMaxWidth) {
      if (vector) {
        bytes =
            std::max({scan_least<T, kWidth, true>(), ReverseSpace<T, kWidth, kDeltaRows, true>::bytes(1, 1),
                      VectorTiles<T, kWidth>::kBytes, PrepareSpace<T, 1, true>::kBlockBytes});
      }
    }
    fits = bytes <= limit;
    return cudaSuccess;
  });
}

}  // namespace girih::kernels

// delta_fits, in a translation unit of its own, so that others do not instantiate the kernels.
#include <algorithm>

#include "delta_product/channel_beta_gradients.cuh"
#include "delta_product/gradients.cuh"
#include "delta_product/prepare.cuh"
#include "delta_product/reverse.cuh"
#include "delta_product/scan.cuh"
#include "tile/instance.h"

namespace girih::kernels {

cudaError_t delta_fits(int D, bool has_channel_beta, bool& fits) {
  using namespace delta_product;
  using T = __half;  // same size as bf16
  fits = false;
  if (D > kDeltaMaxWidth) return cudaSuccess;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return dispatch_width<64, 128, kDeltaMaxWidth>(D, [&](auto width) {
    constexpr int kWidth = width();
    int bytes =
        std::max({scan_min_bytes<T, kWidth>(), ReverseStorage<T, kWidth, kDeltaChunkRows>::bytes(1, 1),
                  gradients_min_bytes<T, kWidth>(), PrepareStorage<T, 1>::kBlockBytes});
    if constexpr (kWidth <= kDeltaChannelBetaMaxWidth) {
      if (has_channel_beta) {
        bytes = std::max({scan_min_bytes<T, kWidth, true>(),
                          ReverseStorage<T, kWidth, kDeltaChunkRows, true>::bytes(1, 1),
                          ChannelBetaTiles<T, kWidth>::kBytes, PrepareStorage<T, 1, true>::kBlockBytes});
      }
    }
    fits = bytes <= limit;
    return cudaSuccess;
  });
}

}  // namespace girih::kernels

// Away from the launches: whoever sees the kernels and launches them compiles them.
#include <algorithm>
#include <type_traits>

#include "delta_product/gradients.cuh"
#include "delta_product/prepare.cuh"
#include "delta_product/reverse.cuh"
#include "delta_product/scan.cuh"
#include "delta_product/vector_gradients.cuh"

namespace girih::kernels {

cudaError_t delta_fits(int D, bool vector, bool& fits) {
  using namespace delta_product;
  using T = __half;  // as large as bf16
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const auto bytes_of = [&](auto width) {
    constexpr int kWidth = width();
    if constexpr (kWidth <= kDeltaVectorMaxWidth) {
      if (vector) {
        return std::max({scan_least<T, kWidth, true>(), reverse_least<T, kWidth, true>(),
                         vector_gradients_least<T, kWidth>(), PrepareSpace<T, 1, true>::kBlockBytes});
      }
    }
    return std::max({scan_least<T, kWidth>(), reverse_least<T, kWidth>(), gradients_least<T, kWidth>(),
                     PrepareSpace<T, 1>::kBlockBytes});
  };
  fits = (D <= 64    ? bytes_of(std::integral_constant<int, 64>())
          : D <= 128 ? bytes_of(std::integral_constant<int, 128>())
                     : bytes_of(std::integral_constant<int, 256>())) <= limit;
  return cudaSuccess;
}

}  // namespace girih::kernels

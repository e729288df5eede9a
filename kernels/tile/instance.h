// Run-time values to template arguments: an element type or a size is passed to a generic lambda as a type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "tile/array.h"

namespace girih::kernels {

template <int Value>
using Constant = std::integral_constant<int, Value>;

// Calls launch(T()) for an element type T of 16 bits; an error for other types.
template <class Launch>
cudaError_t by_short_element(DType dtype, const Launch& launch) {
  if (dtype == DType::bf16) return launch(__nv_bfloat16());
  if (dtype == DType::f16) return launch(__half());
  return cudaErrorInvalidValue;
}
// The same for 16-bit types and fp32.
template <class Launch>
cudaError_t by_element(DType dtype, const Launch& launch) {
  return dtype == DType::f32 ? launch(float()) : by_short_element(dtype, launch);
}

// Calls launch(Constant<W>()) with the smallest W >= width among Width, Wider..., which are in ascending
// order; an error if all are smaller.
template <int Width, int... Wider, class Launch>
cudaError_t by_width(int width, const Launch& launch) {
  if (width <= Width) return launch(Constant<Width>());
  if constexpr (sizeof...(Wider) > 0) return by_width<Wider...>(width, launch);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels

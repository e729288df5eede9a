// The instance that serves a call: a type of elements, or a number, as an argument of a generic lambda.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "tile/array.h"

namespace girih::kernels {

template <int Value>
using Constant = std::integral_constant<int, Value>;

// launch(an element of the type), where that has 16 bits.
template <class Launch>
cudaError_t by_short_element(DType dtype, const Launch& launch) {
  if (dtype == DType::bf16) return launch(__nv_bfloat16());
  if (dtype == DType::f16) return launch(__half());
  return cudaErrorInvalidValue;
}
// Or is fp32.
template <class Launch>
cudaError_t by_element(DType dtype, const Launch& launch) {
  return dtype == DType::f32 ? launch(float()) : by_short_element(dtype, launch);
}

// launch(a Constant): the first of Width, Wider.., which rise, that holds `width`; an error where none does.
template <int Width, int... Wider, class Launch>
cudaError_t by_width(int width, const Launch& launch) {
  if (width <= Width) return launch(Constant<Width>());
  if constexpr (sizeof...(Wider) > 0) return by_width<Wider...>(width, launch);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels

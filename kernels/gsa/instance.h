// The instance that serves a shape.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "gsa/gsa.h"

namespace girih::kernels {

template <int Value>
using Constant = std::integral_constant<int, Value>;

// launch(an element, slots of a tile): the smallest tile that holds M.
template <class Launch>
inline cudaError_t by_instance(const GsaShape& shape, const Launch& launch) {
  const auto with_slots = [&](auto element) {
    if (shape.M <= 64) return launch(element, Constant<64>());
    if (shape.M <= kGsaMaxSlots) return launch(element, Constant<128>());
    return cudaErrorInvalidValue;
  };
  if (shape.dtype == DType::bf16) return with_slots(__nv_bfloat16());
  if (shape.dtype == DType::f16) return with_slots(__half());
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels

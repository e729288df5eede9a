// The functions between chunks.
#pragma once

#include "delta_product/exact.h"

namespace girih::kernels::delta_product {

// phi(x)
__device__ inline float between(Between which, float x) {
  if (which == Between::tanh) return tanhf(x);
  return 0.5f * x * (1.f + erff(x * 0.70710678f));
}

// phi'(x)
__device__ inline float between_slope(Between which, float x) {
  if (which == Between::tanh) {
    const float y = tanhf(x);
    return 1.f - y * y;
  }
  return 0.5f * (1.f + erff(x * 0.70710678f)) + 0.39894228f * x * expf(-0.5f * x * x);
}

}  // namespace girih::kernels::delta_product

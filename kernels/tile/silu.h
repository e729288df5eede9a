// silu(x) = x sigmoid(x) and its derivative.
#pragma once

#include "tile/matrix.h"

namespace girih::kernels {

__device__ inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// sigmoid(x) for a result of type T. For 16-bit types the approximate exponential and reciprocal are used,
// with a relative error of 2^-21.
template <typename T>
__device__ inline float sigmoid_for(float x) {
  return sizeof(T) == 4 ? sigmoid(x) : reciprocal(1.f + exp2_fast(-kLog2E * x));
}

__device__ inline float silu(float x) { return x * sigmoid(x); }

__device__ inline float silu_slope(float x) {
  const float s = sigmoid(x);
  return s + x * s * (1.f - s);
}

}  // namespace girih::kernels

// silu(x) = x sigmoid(x) and its slope.
#pragma once

namespace girih::kernels {

__device__ inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ inline float silu(float x) { return x * sigmoid(x); }

__device__ inline float silu_slope(float x) {
  const float s = sigmoid(x);
  return s + x * s * (1.f - s);
}

}  // namespace girih::kernels

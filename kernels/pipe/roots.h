// Reciprocal square roots.
#pragma once

#include <cuda_runtime.h>

namespace girih::kernels {

// 1 / sqrt(x) of a normal number in one instruction, with an error of up to two roundings.
__device__ inline float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
// 1 / sqrt(x) with one step of Newton's method, accurate to one rounding.
__device__ inline float close_inverse_root(float x) {
  const float y = inverse_root(x), rest = fmaf(-x * y, y, 1.f);
  return fmaf(0.5f * y, rest, y);
}

}  // namespace girih::kernels

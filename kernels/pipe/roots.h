// Functions of a number in one instruction, beside those of tile/matrix.h.
#pragma once

#include <cuda_runtime.h>

namespace girih::kernels {

// 1 / sqrt(x), of a normal number.
__device__ inline float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
// Within a rounding, where the instruction is off by up to two: with a step of Newton's.
__device__ inline float close_inverse_root(float x) {
  const float y = inverse_root(x), rest = fmaf(-x * y, y, 1.f);
  return fmaf(0.5f * y, rest, y);
}

}  // namespace girih::kernels

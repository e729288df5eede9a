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

}  // namespace girih::kernels

// Reciprocal square roots.
#pragma once

#include "tile/ptx.h"

namespace girih::kernels {

// 1 / sqrt(x) of a normal number in one instruction, with an error of up to two roundings.
__device__ inline float rsqrt_fast(float x) { return ptx::rsqrt_approx_ftz(x); }
// 1 / sqrt(x) with one step of Newton's method, accurate to one rounding.
__device__ inline float rsqrt_accurate(float x) {
  const float y = rsqrt_fast(x), rest = fmaf(-x * y, y, 1.f);
  return fmaf(0.5f * y, rest, y);
}

}  // namespace girih::kernels

// What becomes of a row r of a product, with bias b, rate A and scale s of its columns, z = r + b:
//
//     linear  z        sigmoid  s sigmoid(z)        logsigmoid  s log(sigmoid(z))
//     decay  -e^A softplus(z)
//
// in fp32; none: r as it is.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>

namespace girih::kernels {

enum class RowGate : int { none, linear, sigmoid, logsigmoid, decay };

__device__ inline float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// What a gate multiplies by: s, or -e^A.
__device__ inline float factor_of(RowGate gate, float scale, const float* rate, int column) {
  return gate == RowGate::decay ? -expf(rate[column]) : scale;
}

__device__ inline float gate_of(RowGate gate, float z, float factor) {
  if (gate == RowGate::sigmoid) return factor / (1.f + expf(-z));
  if (gate == RowGate::logsigmoid) return -factor * softplus(-z);
  if (gate == RowGate::decay) return factor * softplus(z);
  return z;
}

// By z.
__device__ inline float gate_slope(RowGate gate, float z, float factor) {
  const float s = 1.f / (1.f + expf(-z));
  if (gate == RowGate::sigmoid) return factor * s * (1.f - s);
  if (gate == RowGate::logsigmoid) return factor / (1.f + expf(z));
  if (gate == RowGate::decay) return factor * s;
  return 1.f;
}

}  // namespace girih::kernels

// Gate activations of a row r in fp32, with bias b and rate A of each column, a scale s, and z = r + b:
//
//     linear  z        sigmoid  s sigmoid(z)        logsigmoid  s log(sigmoid(z))
//     decay  -e^A softplus(z)        none  r
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>

namespace girih::kernels {

enum class RowGate : int { none, linear, sigmoid, logsigmoid, decay };

__device__ inline float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// The factor of the activation: s, or -e^A for decay.
__device__ inline float factor_of(RowGate gate, float scale, const float* rate, int column) {
  return gate == RowGate::decay ? -expf(rate[column]) : scale;
}

__device__ inline float gate_of(RowGate gate, float z, float factor) {
  if (gate == RowGate::sigmoid) return factor / (1.f + expf(-z));
  if (gate == RowGate::logsigmoid) return -factor * softplus(-z);
  if (gate == RowGate::decay) return factor * softplus(z);
  return z;
}

// The derivative of the activation with respect to z.
__device__ inline float gate_slope(RowGate gate, float z, float factor) {
  const float s = 1.f / (1.f + expf(-z));
  if (gate == RowGate::sigmoid) return factor * s * (1.f - s);
  if (gate == RowGate::logsigmoid) return factor / (1.f + expf(z));
  if (gate == RowGate::decay) return factor * s;
  return 1.f;
}

}  // namespace girih::kernels

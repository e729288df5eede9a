// Gated RMS norm over the last dimension, one row after the other:
//
//     r = (mean(x^2) + eps)^-1/2        n = r x        y = n weight act(gate)
//
// x, gate, y and their gradients are dense [rows, dim] of one type (fp32, fp16 or bf16); weight may have
// another. All arithmetic is fp32. Every result has the same bits from run to run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"

namespace girih::kernels {

// A row is held in the registers of one block at most.
constexpr int64_t kGatedRmsNormMaxDim = 8192;

enum class GateActivation : int { none, silu, gelu, sigmoid };  // none: there is no gate

struct GatedRmsNormShape {
  int64_t rows;
  int dim;  // 1 to kGatedRmsNormMaxDim
  float eps;
  GateActivation activation;
  DType dtype;  // of all but weight
};

struct GatedRmsNormForward {
  GatedRmsNormShape shape;
  const void* x;
  In<1> weight;      // [dim]
  const void* gate;  // null without a gate
  void* y;
};

struct GatedRmsNormBackward {
  GatedRmsNormShape shape;
  const void* dy;
  const void* x;
  In<1> weight;
  const void* gate;  // null without a gate
  void* dx;
  Out<1> dweight;   // [dim]
  void* dgate;      // where gate is
  float* partials;  // gated_rms_norm_partials(shape) floats
};

// Floats of workspace for dweight's sum over the rows: a function of the sizes alone.
int64_t gated_rms_norm_partials(const GatedRmsNormShape& shape);

cudaError_t gated_rms_norm_forward(const GatedRmsNormForward& problem, cudaStream_t stream);
cudaError_t gated_rms_norm_backward(const GatedRmsNormBackward& problem, cudaStream_t stream);

}  // namespace girih::kernels

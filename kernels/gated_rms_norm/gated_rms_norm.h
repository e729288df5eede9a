// Gated RMS norm of every row:
//
//     r = (mean(x^2) + eps)^-1/2        n = r x        y = n weight act(gate)
//
// x, gate, y and their gradients are contiguous [rows, dim] of one type (fp32, fp16 or bf16); weight may have
// another type. All arithmetic is fp32. Results are deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/workspace.h"

namespace girih::kernels {

// The registers of one block hold a row.
constexpr int64_t kGatedRmsNormMaxDim = 8192;

enum class GateActivation : int { none, silu, gelu, sigmoid };  // none: no gate

struct GatedRmsNormShape {
  int64_t rows;
  int dim;  // 1 to kGatedRmsNormMaxDim
  float eps;
  GateActivation activation;
  DType dtype;  // of all tensors but weight
};

struct GatedRmsNormForward {
  GatedRmsNormShape shape;
  const void* x;
  InputTensor<1> weight;  // [dim]
  const void* gate;       // null if there is no gate
  void* y;
};

struct GatedRmsNormBackward {
  GatedRmsNormShape shape;
  const void* dy;
  const void* x;
  InputTensor<1> weight;
  const void* gate;  // null if there is no gate
  void* dx;
  OutputTensor<1> dweight;  // [dim]
  void* dgate;              // null if gate is null
};

cudaError_t gated_rms_norm_forward(const GatedRmsNormForward& problem, cudaStream_t stream);
cudaError_t gated_rms_norm_backward(const GatedRmsNormBackward& problem, Workspace& workspace,
                                    cudaStream_t stream);

}  // namespace girih::kernels

// The gate activations of tile/gate_function.h for many rows, in training, and their gradients:
//
//     dx = dy y'(z)        db = sum over rows of dy y'(z)        dA = sum over rows of dy y
//
// All arithmetic is fp32. Results are deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/gate_function.h"
#include "tile/workspace.h"

namespace girih::kernels {

constexpr int kGateActivationsPack = 8;  // columns of a pack

struct GateActivations {
  int64_t rows;
  int columns;
  GateFunction gate;  // not none
  DType dtype;        // of x and dx
  const void* x;
  int64_t stride;     // elements between the rows of x; a row is contiguous
  bool use_packs;     // columns and stride are multiples of a pack, and x is aligned to a pack
  const float* bias;  // [columns], or null: 0
  const float* rate;  // [columns], for `decay`
  float scale;
  float* y;  // [rows, columns], contiguous
};
cudaError_t gate_activations(const GateActivations& problem, cudaStream_t stream);

struct GateActivationsBackward {
  GateActivations forward;  // the arguments of forward, without y
  const float* dy;          // [rows, columns], contiguous
  void* dx;                 // [rows, columns], contiguous
  float* sums;              // [2, columns]: db, dA (0 for gates other than `decay`); null: not computed
};
cudaError_t gate_activations_backward(const GateActivationsBackward& problem, Workspace& workspace,
                                      cudaStream_t stream);

}  // namespace girih::kernels

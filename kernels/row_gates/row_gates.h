// The gate activations of tile/row_gate.h for many rows, in training, and their gradients:
//
//     dx = dy y'(z)        db = sum over rows of dy y'(z)        dA = sum over rows of dy y
//
// All arithmetic is fp32. Results are deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/row_gate.h"

namespace girih::kernels {

constexpr int kRowGatesPack = 8;  // columns of a pack

struct RowGates {
  int64_t rows;
  int columns;
  RowGate gate;  // not none
  DType dtype;   // of x and dx
  const void* x;
  int64_t stride;     // elements between the rows of x; a row is contiguous
  bool in_packs;      // columns and stride are multiples of a pack, and x is aligned to a pack
  const float* bias;  // [columns], or null: 0
  const float* rate;  // [columns], for `decay`
  float scale;
  float* y;  // [rows, columns], contiguous
};
cudaError_t row_gates(const RowGates& problem, cudaStream_t stream);

struct RowGatesBackward {
  RowGates of;      // the arguments of forward, without y
  const float* dy;  // [rows, columns], contiguous
  void* dx;         // [rows, columns], contiguous
  float* sums;      // [2, columns]: db, dA (0 for gates other than `decay`); null: not computed
  float* partials;  // row_gates_partials() floats, with sums
};
int64_t row_gates_partials(const RowGates& problem);
cudaError_t row_gates_backward(const RowGatesBackward& problem, cudaStream_t stream);

}  // namespace girih::kernels

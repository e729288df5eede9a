// The gates of tile/row_gate.h of many rows, in training, and their gradients:
//
//     dx = dy y'(z)        db = sum over rows of dy y'(z)        dA = sum over rows of dy y
//
// All arithmetic is fp32. Every result has the same bits from run to run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/row_gate.h"

namespace girih::kernels {

constexpr int kRowGatesPack = 8;  // columns

struct RowGates {
  int64_t rows;
  int columns;
  RowGate gate;  // but none
  DType dtype;   // of x and dx
  const void* x;
  int64_t stride;     // elements from a row of x to the next; a row is dense
  bool in_packs;      // columns and stride are multiples of a pack, and x begins where one does
  const float* bias;  // [columns], or null: 0
  const float* rate;  // [columns], of `decay`
  float scale;
  float* y;  // [rows, columns], dense
};
cudaError_t row_gates(const RowGates& problem, cudaStream_t stream);

struct RowGatesBackward {
  RowGates of;      // without y
  const float* dy;  // [rows, columns], dense
  void* dx;         // the same
  float* sums;      // [2, columns]: db, dA (0 but of `decay`); null: not asked for
  float* partials;  // row_gates_partials() floats where they are
};
int64_t row_gates_partials(const RowGates& problem);
cudaError_t row_gates_backward(const RowGatesBackward& problem, cudaStream_t stream);

}  // namespace girih::kernels

// Products of a few rows, those of a decoding step: up to 8 matrices by one x, which is read once,
//
//     y_i = gate_i(u W_i^T) + residual          u = x,  rms_norm(x),  rms_norm(silu(x))  or  silu(x) other
//
// x, W_i and u have one type of 16 bits, sums are fp32 and taken in one order. A matrix is read once, as
// fast as memory gives it, which is all there is to a step's time: in a layer it stands for up to ten
// launches of a product and of what is done before and after it.
#pragma once

#include <cuda_runtime_api.h>

#include "tile/array.h"
#include "tile/row_gate.h"

namespace girih::kernels {

constexpr int kFewRows = 16;
constexpr int kFewRowsMatrices = 8;
constexpr int kFewRowsWidest = 8192;  // u stands in shared memory: rows * width at most kFewRowsElements
constexpr int kFewRowsElements = 96 * 1024;

enum class RowInput : int { plain, rms_norm, silu_rms_norm, silu_product };

struct FewRowsMatrix {
  const void* weight;  // [features, width], dense, aligned to 16 bytes
  int features;
  RowGate gate;       // none: the product in the type of x
  const float* bias;  // [features], or null: 0
  const float* rate;  // [features], of `decay`
  float scale;
  void* y;         // [rows, features], dense
  int first_tile;  // filled in at the launch
};

struct FewRows {
  DType dtype;      // bf16 or f16
  int rows, width;  // 1 to kFewRows; a multiple of 8
  const void* x;    // [rows, width], dense, aligned to 16 bytes, as `other` is
  RowInput input;
  const void* other;  // the norm's weight [width] or the product's second factor [rows, width]
  float eps;
  const void* residual;  // [rows, features] for a single matrix without a gate, or null
  int count;             // of matrices
  FewRowsMatrix matrices[kFewRowsMatrices];
};

cudaError_t few_rows(FewRows problem, cudaStream_t stream);

}  // namespace girih::kernels

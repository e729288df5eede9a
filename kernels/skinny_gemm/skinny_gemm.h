// Skinny matrix products of a decoding step: up to 8 matrices W_i times one x of up to 16 rows,
//
//     y_i = gate_i(u W_i^T) + residual          u = x,  rms_norm(x),  rms_norm(silu(x))  or  silu(x) other
//
// x, W_i and u have one 16-bit type; sums are fp32 in a fixed order. Every matrix is read once, so that
// memory bandwidth bounds the time of a step. In a layer, one launch replaces up to ten launches of products
// and of the operations before and after them.
#pragma once

#include <cuda_runtime_api.h>

#include "skinny_gemm/limits.h"
#include "tile/array.h"
#include "tile/gate_function.h"

namespace girih::kernels {

enum class GemmInput : int { plain, rms_norm, silu_rms_norm, silu_product };

struct SkinnyGemmMatrix {
  const void* weight;  // [features, width], contiguous, aligned to 16 bytes
  int features;
  GateFunction gate;  // none: y has the type of x; else fp32
  const float* bias;  // [features], or null: 0
  const float* rate;  // [features], for `decay`
  float scale;
  void* y;         // [rows, features], contiguous
  int first_tile;  // set by skinny_gemm()
};

struct SkinnyGemm {
  DType dtype;      // bf16 or f16
  int rows, width;  // 1 to kSkinnyGemmMaxRows; a multiple of 8
  const void* x;    // [rows, width], contiguous, aligned to 16 bytes; `other` too
  GemmInput input;
  const void* other;  // the weight of the norm [width] or the second factor of the product [rows, width]
  float eps;
  const void* residual;  // [rows, features] for a single matrix without a gate, or null
  int count;             // number of matrices
  SkinnyGemmMatrix matrices[kSkinnyGemmMaxMatrices];
};

cudaError_t skinny_gemm(SkinnyGemm problem, cudaStream_t stream);

}  // namespace girih::kernels

// The row-wise operations of a language model in training, beside its mixers:
//
//     residual norm    s = x + branch, x or silu(x)        r = (mean(s^2) + eps)^-1/2        y = r s weight
//                      (without a weight, weight = dim^-1/2: y has length 1)
//     SiLU product     y = silu(gate) up
//     cross entropy    l = log(sum of e^z) - z_label        dz = e^z / sum of e^z - [i = label]
//     rotary           rotates the pairs (i, i + D/2) of q and k by the angle position * rate_i
//
// All tensors are contiguous and aligned to 32 bytes; the length of a row is a multiple of kElementwisePack.
// All arithmetic is fp32. Results are deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/workspace.h"

namespace girih::kernels {

constexpr int kElementwisePack = 8;        // elements of a pack
constexpr int kResidualNormMaxDim = 8192;  // the registers of a block hold a row

struct ResidualNormShape {
  int64_t rows;
  int dim;  // up to kResidualNormMaxDim
  float eps;
  DType sum_dtype;  // type of x and s
  DType row_dtype;  // type of branch and y: sum_dtype, or a 16-bit type if sum_dtype is fp32
  bool use_silu;    // s = silu(x): no branch, one type
};

struct ResidualNorm {
  ResidualNormShape shape;
  const void* x;
  const void* branch;     // null: s is x
  InputTensor<1> weight;  // [dim]; null data: rows of length 1
  void* s;                // null if branch is null
  void* y;
};
cudaError_t residual_norm(const ResidualNorm& problem, cudaStream_t stream);

//     n = r s
//     ds = after + r (dy weight - n mean(dy weight n))        with use_silu the second term times silu'(x)
//     dweight = sum over rows of dy n
struct ResidualNormBackward {
  ResidualNormShape shape;
  const void* s;  // with use_silu: x
  InputTensor<1> weight;
  const void* dy;
  const void* after;  // gradient of s from its other readers; null: none
  void* ds;
  void* dbranch;            // ds in the type row_dtype; null: not computed
  OutputTensor<1> dweight;  // [dim]; null: not computed
};
cudaError_t residual_norm_backward(const ResidualNormBackward& problem, Workspace& workspace,
                                   cudaStream_t stream);

struct SiluProduct {
  int64_t elements;
  DType dtype;
  const void *gate, *up;
  void* y;
};
cudaError_t silu_product(const SiluProduct& problem, cudaStream_t stream);

//     dgate = dy up silu'(gate)        dup = dy silu(gate)        and y, recomputed
struct SiluProductBackward {
  int64_t elements;
  DType dtype;
  const void *gate, *up, *dy;
  void *dgate, *dup;
  void* y;  // null: not computed
};
cudaError_t silu_product_backward(const SiluProductBackward& problem, cudaStream_t stream);

struct CrossEntropy {
  int64_t rows;
  int64_t classes;
  DType dtype;
  void* z;                // [rows, classes]; overwritten by dz
  const int64_t* labels;  // [rows]
  int64_t ignored;        // rows with this label have l = 0 and dz = 0
  float* l;               // [rows]; NaN if the label is not a class
};
cudaError_t cross_entropy(const CrossEntropy& problem, cudaStream_t stream);

constexpr int kRotaryMaxDim = 256;  // D

struct RotaryShape {
  int64_t batch, tokens;
  int query_heads, heads;  // heads of q; heads of k and of v
  int D;                   // a multiple of 2 kElementwisePack up to kRotaryMaxDim
  DType dtype;
  const int64_t* position;  // [T], or [B, T]
  bool has_row_positions;   // whether position is [B, T]
  const float* rate;        // [D / 2]
};

// Splits x into q, k and v and rotates q and k. cos and sin of the fp32 angle are rounded to dtype.
struct Rotary {
  RotaryShape shape;
  const void* x;    // [B, T, query_heads + 2 heads, D]
  void *q, *k, *v;  // [B, T, query_heads, D], [B, T, heads, D]
};
cudaError_t rotary(const Rotary& problem, cudaStream_t stream);

struct RotaryBackward {
  RotaryShape shape;
  const void *dq, *dk, *dv;
  void* dx;
};
cudaError_t rotary_backward(const RotaryBackward& problem, cudaStream_t stream);

}  // namespace girih::kernels

// What a language model computes row by row beside its mixers, in training:
//
//     residual norm    s = x + branch, x or silu(x)        r = (mean(s^2) + eps)^-1/2        y = r s weight
//                      or, without a weight, rows of length 1
//     SiLU product     y = silu(gate) up
//     cross entropy    l = log(sum of e^z) - z_label        dz = e^z / sum of e^z - [i = label]
//     rotary           the pairs (i, i + D/2) of q and k turned by position * rate_i
//
// All tensors are dense and begin at a multiple of 32 bytes, rows are a multiple of kModelRowsPack long. All
// arithmetic is fp32. Every result has the same bits from run to run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"

namespace girih::kernels {

constexpr int kModelRowsPack = 8;          // elements
constexpr int kResidualNormWidest = 8192;  // of a row, which a block's registers hold

struct ResidualNormShape {
  int64_t rows;
  int dim;  // up to kResidualNormWidest
  float eps;
  DType of_sum;   // x and s
  DType of_rows;  // branch and y: the same, or 16 bits of fp32 sums
  bool of_silu;   // y is of silu(x): of one type, without a branch
};

struct ResidualNorm {
  ResidualNormShape shape;
  const void* x;
  const void* branch;  // null: s is x
  In<1> weight;        // [dim]; no data: rows of length 1
  void* s;             // where branch is
  void* y;
};
cudaError_t residual_norm(const ResidualNorm& problem, cudaStream_t stream);

//     n = r s
//     ds = ds after + r (dy weight - n mean(dy weight n)), of silu(x) times silu'(x)
//     dweight = sum over rows of dy n
struct ResidualNormBackward {
  ResidualNormShape shape;
  const void* s;  // x, where y is of silu(x)
  In<1> weight;
  const void* dy;
  const void* after;  // ds of what else reads s; null: nothing does
  void* ds;
  void* dbranch;    // ds in of_rows; null: not asked for
  Out<1> dweight;   // [dim]; null: not asked for
  float* partials;  // residual_norm_partials(shape) floats where it is
};
int64_t residual_norm_partials(const ResidualNormShape& shape);
cudaError_t residual_norm_backward(const ResidualNormBackward& problem, cudaStream_t stream);

struct SiluProduct {
  int64_t elements;
  DType dtype;
  const void *gate, *up;
  void* y;
};
cudaError_t silu_product(const SiluProduct& problem, cudaStream_t stream);

//     dgate = dy up silu'(gate)        dup = dy silu(gate)        y, for who has not kept it
struct SiluProductBackward {
  int64_t elements;
  DType dtype;
  const void *gate, *up, *dy;
  void *dgate, *dup;
  void* y;  // null: not asked for
};
cudaError_t silu_product_backward(const SiluProductBackward& problem, cudaStream_t stream);

struct CrossEntropy {
  int64_t rows;
  int64_t classes;
  DType dtype;
  void* z;                // [rows, classes], in the end dz
  const int64_t* labels;  // [rows]
  int64_t ignored;        // the label of rows that do not count: their l and dz are 0
  float* l;               // [rows]; NaN where a label is no class
};
cudaError_t cross_entropy(const CrossEntropy& problem, cudaStream_t stream);

constexpr int kRotaryWidest = 256;  // D

struct RotaryShape {
  int64_t batch, tokens;
  int query_heads, heads;  // of q; of k and of v
  int D;                   // a multiple of 2 kModelRowsPack up to kRotaryWidest
  DType dtype;
  const int64_t* position;  // [T], or [B, T]
  bool of_sequences;        // whether it is [B, T]
  const float* rate;        // [D / 2]
};

// q, k and v of x, q and k turned; cos and sin are of the angle in fp32, rounded to dtype.
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

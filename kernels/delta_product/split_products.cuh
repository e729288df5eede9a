// Products of 16 x 16 blocks whose factors are split into two bf16 numbers, hi + lo (16 bits of mantissa).
#pragma once

#include "tile/matrix.h"

namespace girih::kernels::delta_product {

using Block = Accumulator<2>;

// Two neighbouring elements of a factor, split.
struct Parts {
  uint32_t hi, lo;
};

__device__ inline Parts split(float left, float right) {
  const uint32_t hi = pack_pair<__nv_bfloat16>(left, right);
  const float2 back = unpack_pair<__nv_bfloat16>(hi);
  return {hi, pack_pair<__nv_bfloat16>(left - back.x, right - back.y)};
}

__device__ inline Parts transpose_parts(const Parts& x) {
  return {transpose_pairs(x.hi), transpose_pairs(x.lo)};
}

// A 16 x 16 block, split, as an A fragment.
struct Split {
  uint32_t hi[4], lo[4];

  __device__ void set(int i, const Parts& x) { hi[i] = x.hi, lo[i] = x.lo; }
};

__device__ inline Split split(const Block& x) {
  Split parts;
#pragma unroll
  for (int i = 0; i < 4; ++i) parts.set(i, split(x.at[i / 2][i % 2 * 2], x.at[i / 2][i % 2 * 2 + 1]));
  return parts;
}

// A 16 x 16 block from 8 x 8 blocks:
//     ( a  0 )
//     ( b  c )
__device__ inline Split triangle(const Parts& a, const Parts& b, const Parts& c) {
  return {{a.hi, b.hi, 0, c.hi}, {a.lo, b.lo, 0, c.lo}};
}

__device__ inline Split transposed_triangle(const Parts& a, const Parts& b, const Parts& c) {
  const Parts a_transposed = transpose_parts(a), b_transposed = transpose_parts(b),
              c_transposed = transpose_parts(c);
  return {{a_transposed.hi, 0, b_transposed.hi, c_transposed.hi},
          {a_transposed.lo, 0, b_transposed.lo, c_transposed.lo}};
}

// sums += left right^T, for 8 rows of right; right0 and right1 are its left and right half.
__device__ inline void add_split_product(float (&sums)[4], const Split& left, const Parts& right0,
                                         const Parts& right1) {
  mma<__nv_bfloat16>(sums, left.lo, right0.hi, right1.hi);
  mma<__nv_bfloat16>(sums, left.hi, right0.lo, right1.lo);
  mma<__nv_bfloat16>(sums, left.hi, right0.hi, right1.hi);
}

// sums += left right^T. The A fragment of a block is also the B fragment of its transpose.
__device__ inline void add_split_product(Block& sums, const Split& left, const Split& right) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    add_split_product(sums.at[n], left, {right.hi[n], right.lo[n]}, {right.hi[n + 2], right.lo[n + 2]});
  }
}

__device__ inline Block split_product(const Split& left, const Split& right) {
  Block sums;
  fill(sums, 0.f);
  add_split_product(sums, left, right);
  return sums;
}

}  // namespace girih::kernels::delta_product

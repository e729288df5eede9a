// The prepared data of a chunk: X and the factors of its rows, their layouts in memory and in registers.
#pragma once

#include <type_traits>

#include "delta_product/delta_product.h"
#include "delta_product/pass.h"
#include "tile/matrix.h"

namespace girih::kernels::delta_product {

constexpr int kTileRows = 16;  // rows of one warp of a product
constexpr int kTilesDown = kDeltaRows / kTileRows;

// Index of block (i, j) of X, j <= i, among the ten blocks.
__host__ __device__ constexpr int block_of(int i, int j) { return i * (i + 1) / 2 + j; }

// The factors of the rows of a chunk, in shared memory (enum DeltaVector).
struct Vectors {
  const float* data;

  __device__ float element(int vector, int at) const { return data[vector * kDeltaRows + at]; }
  // Elements `at` and `at` + 8.
  __device__ float2 rows(int vector, int at) const { return {element(vector, at), element(vector, at + 8)}; }
  // The lane's two of the eight elements from `at` on.
  __device__ float2 pair(int vector, int at) const {
    return *reinterpret_cast<const float2*>(data + vector * kDeltaRows + at + lane_col());
  }
};

// One factor of all rows of a chunk, in the layout of the columns of an accumulator.
struct RowFactors {
  float2 at[kDeltaRows / 8];

  RowFactors() = default;
  __device__ RowFactors(const Vectors& vectors, int vector) {
#pragma unroll
    for (int i = 0; i < kDeltaRows / 8; ++i) at[i] = vectors.pair(vector, 8 * i);
  }
};

// The prepared data of a chunk and head, in shared memory; the rounding errors of X stay in global memory.
struct Prepared {
  const unsigned char* data;

  // Block (i, j) of X as an A fragment.
  __device__ void load(uint32_t (&x)[4], int i, int j) const { load_matrices(x, block(i, j)); }
  __device__ bool keeps() const { return *reinterpret_cast<const float*>(data + kDeltaFlag) != 0.f; }
  __device__ bool divides() const { return *reinterpret_cast<const float*>(data + kDeltaDivides) != 0.f; }
  __device__ Vectors vectors() const { return {reinterpret_cast<const float*>(data + kDeltaInverseBytes)}; }

 private:
  __device__ uint32_t block(int i, int j) const {
    return shared_address(data + block_of(i, j) * 512 + lane() * 16);
  }
};

// Address in global memory; `number` is the index of chunk and head.
template <typename Number>
__device__ inline const unsigned char* prepared_at(const void* prepared, Number number) {
  return static_cast<const unsigned char*>(prepared) + number * kDeltaPreparedBytes;
}
__device__ inline const unsigned char* prepared_at(const void* prepared, const DeltaShape& shape,
                                                   int64_t chunk, int head) {
  return prepared_at(prepared, chunk * shape.heads + head);
}

// Factors may move from one operand to another before rounding: bf16 has the exponent range of fp32. In fp16
// small elements would lose digits.
template <typename T>
constexpr bool kHasRange = std::is_same_v<T, __nv_bfloat16>;
// True if reverse stores dv = beta G in place of G. p: the arguments of reverse or of gradients.
template <typename T, class Pass>
__device__ inline bool divides(const Pass& p, const Prepared& prepared) {
  return kHasRange<T> && p.in_place && prepared.divides();
}

// Loads the rounding errors of block (i, j) of X.
__device__ inline void load_lost(uint32_t (&x)[4], const unsigned char* prepared, int i, int j) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    x[m] = reinterpret_cast<const uint32_t*>(prepared + kDeltaLost + block_of(i, j) * 512 + m * 128)[lane()];
  }
}

// X in shared memory in the layout of wgmma's B operand without swizzle. Rows 0 to 31 come first, then rows
// 32 to 63; each half is stored by 16 columns, including the zero blocks right of the diagonal that complete
// squares of 32. Of 16 columns the four 8 x 8 matrices of the first 8 columns come first, then the four of
// the other 8.
struct InverseRows {
  static constexpr int kBytes = 12 * 512;
  static constexpr int kNext = 512;  // bytes from the first 8 of 16 columns to the other 8

  const unsigned char* data;

  __host__ __device__ static constexpr int block(int i, int j) {
    return 2048 * (i / 2) + 1024 * j + 256 * (i % 2);
  }

  // Block (i, j) as an A fragment, or its four 8 x 8 matrices transposed.
  __device__ void load(uint32_t (&x)[4], int i, int j) const { load_matrices(x, of_lane(i, j)); }
  __device__ void load_transposed(uint32_t (&x)[4], int i, int j) const {
    load_matrices_transposed(x, of_lane(i, j));
  }

 private:
  __device__ uint32_t of_lane(int i, int j) const {
    return shared_address(data + block(i, j) + (lane() >> 4) * kNext + (lane() & 15) * 16);
  }
};

}  // namespace girih::kernels::delta_product

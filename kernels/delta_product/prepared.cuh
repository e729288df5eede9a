// What was prepared of a chunk: X and the factors of its rows, how they lie in memory and as products take
// them.
#pragma once

#include <type_traits>

#include "delta_product/delta_product.h"
#include "delta_product/pass.h"
#include "tile/matrix.h"

namespace girih::kernels::delta_product {

constexpr int kTileRows = 16;  // of a warp's products
constexpr int kTilesDown = kDeltaRows / kTileRows;

// Of the block (i, j) of X, j <= i, among the ten.
__host__ __device__ constexpr int block_of(int i, int j) { return i * (i + 1) / 2 + j; }

// The factors of a chunk's rows.
struct Vectors {
  const float* data;

  __device__ float element(int vector, int at) const { return data[vector * kDeltaRows + at]; }
  // That at `at` and the one 8 further.
  __device__ float2 rows(int vector, int at) const { return {element(vector, at), element(vector, at + 8)}; }
  // The lane's two of eight elements from `at` on.
  __device__ float2 pair(int vector, int at) const {
    return *reinterpret_cast<const float2*>(data + vector * kDeltaRows + at + lane_col());
  }
};

// Those of the lane's rows among a product's columns.
struct RowFactors {
  float2 at[kDeltaRows / 8];

  RowFactors() = default;
  __device__ RowFactors(const Vectors& vectors, int vector) {
#pragma unroll
    for (int i = 0; i < kDeltaRows / 8; ++i) at[i] = vectors.pair(vector, 8 * i);
  }
};

// What was prepared of a chunk and head, in shared memory up to what rounding took from X.
struct Prepared {
  const unsigned char* data;

  // The block (i, j) of X: as a left factor, or the four matrices transposed.
  __device__ void load(uint32_t (&x)[4], int i, int j) const { load_matrices(x, block(i, j)); }
  __device__ bool keeps() const { return *reinterpret_cast<const float*>(data + kDeltaFlag) != 0.f; }
  __device__ bool divides() const { return *reinterpret_cast<const float*>(data + kDeltaDivides) != 0.f; }
  __device__ Vectors vectors() const { return {reinterpret_cast<const float*>(data + kDeltaInverseBytes)}; }

 private:
  __device__ uint32_t block(int i, int j) const {
    return shared_address(data + block_of(i, j) * 512 + lane() * 16);
  }
};

// Where it lies in global memory; `number`: of the chunk and head among all.
template <typename Number>
__device__ inline const unsigned char* prepared_at(const void* prepared, Number number) {
  return static_cast<const unsigned char*>(prepared) + number * kDeltaPreparedBytes;
}
__device__ inline const unsigned char* prepared_at(const void* prepared, const DeltaShape& shape,
                                                   int64_t chunk, int head) {
  return prepared_at(prepared, chunk * shape.heads + head);
}

// Whether what is rounded may have a factor in it that is put in, or taken out, elsewhere. (fp16 has no
// exponents for that: small elements would lose digits.)
template <typename T>
constexpr bool kHasRange = std::is_same_v<T, __nv_bfloat16>;
// Whether reverse leaves dv = beta G in place of G; p: of reverse or the gradients.
template <typename T, class Pass>
__device__ inline bool divides(const Pass& p, const Prepared& prepared) {
  return kHasRange<T> && p.in_place && prepared.divides();
}

// What rounding took from the block (i, j) of X.
__device__ inline void load_lost(uint32_t (&x)[4], const unsigned char* prepared, int i, int j) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    x[m] = reinterpret_cast<const uint32_t*>(prepared + kDeltaLost + block_of(i, j) * 512 + m * 128)[lane()];
  }
}

// The blocks of X in shared memory as the products of a chain take them: first those of rows 0 to 31, then
// those of the others, by 16 columns, with the zeros right of the diagonal that they need to be squares of
// 32; of each 16 columns the four 8 x 8 matrices of the first 8, then those of the others.
struct InverseRows {
  static constexpr int kBytes = 12 * 512;
  static constexpr int kNext = 512;  // from 8 columns to the others

  const unsigned char* data;

  __host__ __device__ static constexpr int block(int i, int j) {
    return 2048 * (i / 2) + 1024 * j + 256 * (i % 2);
  }

  // As a left factor, or the four matrices transposed.
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

// The prepared data of a chunk: X and the factors of its rows, their layouts in memory and in registers.
#pragma once

#include <type_traits>

#include "delta_product/kernels.h"
#include "delta_product/params.h"
#include "tile/matrix.h"

namespace girih::kernels::delta_product {

constexpr int kTileRows = 16;  // rows of a warp in a product
constexpr int kChunkTiles = kDeltaChunkRows / kTileRows;

// Index of block (i, j) of X, j <= i, among the ten blocks.
__host__ __device__ constexpr int inverse_block_index(int i, int j) { return i * (i + 1) / 2 + j; }

// The factors of the rows of a chunk, in shared memory; `kind` is a DeltaFactor.
struct ChunkFactors {
  const float* data;

  __device__ float element(int kind, int at) const { return data[kind * kDeltaChunkRows + at]; }
  // The elements of rows `at` and `at` + 8.
  __device__ float2 rows(int kind, int at) const { return {element(kind, at), element(kind, at + 8)}; }
  // The lane's two elements of the eight rows from `at` on.
  __device__ float2 pair(int kind, int at) const {
    return *reinterpret_cast<const float2*>(data + kind * kDeltaChunkRows + at + lane_col());
  }
};

// One factor of all rows of a chunk, in the layout of the columns of an accumulator.
struct RowFactorFragment {
  float2 at[kDeltaChunkRows / 8];

  RowFactorFragment() = default;
  __device__ RowFactorFragment(const ChunkFactors& chunk_factors, int kind) {
#pragma unroll
    for (int i = 0; i < kDeltaChunkRows / 8; ++i) at[i] = chunk_factors.pair(kind, 8 * i);
  }
};

// The prepared data of a chunk and head, in shared memory with the offsets of global memory; the rounding
// errors of X stay in global memory.
struct Prepared {
  const unsigned char* data;

  // Loads block (i, j) of X as an A fragment.
  __device__ void load_inverse(uint32_t (&x)[4], int i, int j) const { ldmatrix(x, lane_address(i, j)); }
  __device__ bool has_inverse_lo() const {
    return *reinterpret_cast<const float*>(data + kDeltaHasInverseLoOffset) != 0.f;
  }
  __device__ bool can_divide_by_beta() const {
    return *reinterpret_cast<const float*>(data + kDeltaCanDivideByBetaOffset) != 0.f;
  }
  __device__ ChunkFactors chunk_factors() const {
    return {reinterpret_cast<const float*>(data + kDeltaInverseBytes)};
  }

 private:
  __device__ uint32_t lane_address(int i, int j) const {
    return shared_address(data + inverse_block_index(i, j) * 512 + lane() * 16);
  }
};

// Address in global memory; `number` is chunk * H + head.
template <typename Number>
__device__ inline const unsigned char* prepared_at(const void* prepared, Number number) {
  return static_cast<const unsigned char*>(prepared) + number * kDeltaPreparedBytes;
}
__device__ inline const unsigned char* prepared_at(const void* prepared, const DeltaShape& shape,
                                                   int64_t chunk, int head) {
  return prepared_at(prepared, chunk * shape.heads + head);
}

// True if an operand may be rounded with or without a factor: bf16 has the exponent range of fp32, while
// small elements of fp16 lose digits.
template <typename T>
constexpr bool kHasFp32Range = std::is_same_v<T, __nv_bfloat16>;
// True if dz of the chunk holds dv = beta G; false if dz holds G. p: the arguments of reverse or of
// gradients.
template <typename T, class Params>
__device__ inline bool dz_holds_dv(const Params& p, const Prepared& prepared) {
  return kHasFp32Range<T> && p.in_place && prepared.can_divide_by_beta();
}

// Loads the rounding errors of block (i, j) of X.
__device__ inline void load_inverse_lo(uint32_t (&x)[4], const unsigned char* prepared, int i, int j) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    x[m] = reinterpret_cast<const uint32_t*>(prepared + kDeltaInverseLoOffset +
                                             inverse_block_index(i, j) * 512 + m * 128)[lane()];
  }
}

// X in shared memory in the layout of wgmma's B operand without swizzle: 8 x 8 matrices of 128 bytes, in the
// order of these loops, the outermost first:
//     rows 0 to 31, rows 32 to 63                        (a product has N = 32)
//     groups of 16 columns: 2 for rows 0 to 31, else 4   (includes the zero blocks (0, 1) and (2, 3))
//     the two halves of 8 columns
//     four matrices of 8 rows
struct InverseTile {
  static constexpr int kBytes = 12 * 512;
  static constexpr int kColumnStride = 512;  // bytes from the first 8 of 16 columns to the other 8

  const unsigned char* data;

  // Byte offset of block (i, j), j < 2 (i / 2 + 1).
  __host__ __device__ static constexpr int block(int i, int j) {
    return 2048 * (i / 2) + 1024 * j + 256 * (i % 2);
  }

  // Block (i, j) as an A fragment, or its four 8 x 8 matrices transposed.
  __device__ void load(uint32_t (&x)[4], int i, int j) const { ldmatrix(x, lane_address(i, j)); }
  __device__ void load_transposed(uint32_t (&x)[4], int i, int j) const {
    ldmatrix_trans(x, lane_address(i, j));
  }

 private:
  __device__ uint32_t lane_address(int i, int j) const {
    return shared_address(data + block(i, j) + (lane() >> 4) * kColumnStride + (lane() & 15) * 16);
  }
};

}  // namespace girih::kernels::delta_product

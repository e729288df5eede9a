// Stores of the state of a scan: from accumulators to shared memory as a B operand, and from shared memory to
// global memory.
#pragma once

#include "tile/matrix.h"
#include "tile/row_store.h"

namespace girih::kernels {

// Rounds 16 x 16 blocks of a matrix A for products x A^T. The registers have the order of an A fragment with
// the middle two exchanged, so that the two registers of one product are neighbours.
template <typename T, int K, int N>
__device__ inline void round_to_b_fragment(BFragment<K>& a, const Accumulator<N>& sums) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    a.at[k][0] = pack_pair<T>(sums.at[2 * k][0], sums.at[2 * k][1]);
    a.at[k][1] = pack_pair<T>(sums.at[2 * k + 1][0], sums.at[2 * k + 1][1]);
    a.at[k][2] = pack_pair<T>(sums.at[2 * k][2], sums.at[2 * k][3]);
    a.at[k][3] = pack_pair<T>(sums.at[2 * k + 1][2], sums.at[2 * k + 1][3]);
  }
}
// Stores the blocks to 16 rows of a tile, row-major, from (row, col) on.
template <class Tile, int K>
__device__ inline void store_b_fragment(const Tile& tile, int row, int col, const BFragment<K>& a) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#if __CUDA_ARCH__ >= 900
    const int l = lane();
    stmatrix(tile.address(row, col + 16 * k, (l & 7) + (l >> 4) * 8, ((l >> 3) & 1) * 8), a.at[k]);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint32_t*>(&lane_element(tile, row + i / 2 * 8, col + 16 * k + i % 2 * 8)) =
          a.at[k][i];
    }
#endif
  }
}

// Copies `Bytes` (a multiple of 4096) from shared to global memory as one warp. The source may be overwritten
// when the function returns.
template <int Bytes>
__device__ inline void store_bytes(void* to, const void* from) {
#if __CUDA_ARCH__ >= 900
  if ((threadIdx.x & 31) == 0) ptx::cp_async_bulk_store<Bytes>(to, shared_address(from));
  __syncwarp();
#else
  constexpr int kBatch = 8;
#pragma unroll 1
  for (int first = 0; first < Bytes / 512; first += kBatch) {
    uint32_t pack[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint4 raw = static_cast<const uint4*>(from)[(first + i) * 32 + lane()];
      pack[i][0] = raw.x, pack[i][1] = raw.y, pack[i][2] = raw.z, pack[i][3] = raw.w;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) store_pack(static_cast<uint4*>(to) + (first + i) * 32 + lane(), pack[i]);
  }
#endif
}

}  // namespace girih::kernels

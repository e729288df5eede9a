// Shared code of the warpgroup kernels. Two warpgroups multiply, 64 rows each; one warp of a third warpgroup
// loads by TMA.
#pragma once

#include "cat_attention/sm90/plan.cuh"
#include "pipe/ring.h"
#include "pipe/roles.h"
#include "tile/cuts.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/row_store.h"
#include "tile/warpgroup.h"

namespace girih::kernels {

constexpr int kCatSm90Threads = 384, kCatSm90MmaWarps = 8;
constexpr int kCatSm90MaxBytes = 227 * 1024;  // maximum of shared memory

// Whether the kernel has a body for this architecture. Where it is empty, has_warpgroups() is false.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
constexpr bool kIsCatSm90Compiled = true;
#else
constexpr bool kIsCatSm90Compiled = false;
#endif

// Registers of a multiplying thread, and of a thread of the loading warpgroup.
template <int Mma, int Loader>
struct CatSm90Registers {
  static constexpr int kMma = Mma, kLoader = Loader;
  static_assert(fit_registers(kCatSm90Threads, {{2, Mma}, {1, Loader}}));
};

// Loads all columns of a tile of rows.
template <class Rows>
__device__ inline void copy_rows(const Rows& to, const TensorMap& boxes, TmaCoords at, uint64_t* barrier) {
#pragma unroll
  for (int col = 0; col < Rows::kCols; col += 64) {
    tma_load(shared_address(to.block(col).data), boxes, {col, at.row, at.head, at.batch}, barrier);
  }
}

// All threads run init(), which initialises the barriers; then two warpgroups run multiply() and one warp of
// the third runs load().
template <class Registers, class Init, class Load, class Multiply>
__device__ inline void run_warp_roles(const Init& init, const Load& load, const Multiply& multiply) {
  init();
  fence_barrier_init();
  __syncthreads();
  if (warp_index() >= kCatSm90MmaWarps) {
    setmaxnreg_dec<Registers::kLoader>();
    if (warp_index() == kCatSm90MmaWarps) load();
    return;
  }
  setmaxnreg_inc<Registers::kMma>();
  multiply();
}

// Launches one block for each multiprocessor, or for each tile if there are fewer tiles.
template <auto Kernel, class Problem>
cudaError_t launch_persistent(const Problem& p, int64_t items, int bytes, cudaStream_t stream) {
  int processors = 0;
  if (const cudaError_t error = processor_count(processors); error != cudaSuccess) return error;
  return launch_kernel<Kernel>(p, items < processors ? items : processors, kCatSm90Threads, bytes, stream);
}

// Stores row i of the lane's two rows, times `by`, in packs of 16 bytes. With `by` = 0 the result is 0 for
// all values.
template <typename T, int N>
__device__ inline void store_row(T* to, const Accumulator<N>& x, int i, float by, int width, bool is) {
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    uint32_t pack[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pack[j] = by == 0.f ? 0 : pack_pair<T>(x.at[n + j][2 * i] * by, x.at[n + j][2 * i + 1] * by);
    }
    transpose_quad(pack);
    const int col = 8 * (n + (lane() & 3));
    if (is && col < width) store_pack(to + col, pack);
  }
}

}  // namespace girih::kernels

// Tiles of 16-bit or 32-bit elements in shared memory, and the asynchronous copies that fill them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace girih::kernels {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Rows x Cols elements. A row is 16 bytes longer than its contents: 8 rows below one another (what ldmatrix
// reads at once) then start in 8 different groups of 4 banks for every width used here.
template <typename T, int Rows, int Cols>
struct SharedTile {
  static constexpr int kRows = Rows;
  static constexpr int kCols = Cols;
  static constexpr int kPitch = Cols + 16 / static_cast<int>(sizeof(T));
  static constexpr int kBytes = Rows * kPitch * static_cast<int>(sizeof(T));
  static_assert(kBytes % 16 == 0);

  T* data;

  __device__ T& at(int row, int col) const { return data[row * kPitch + col]; }
  __device__ uint32_t address(int row, int col) const { return shared_address(data + row * kPitch + col); }
};

// 16 bytes from global to shared memory, or 16 zero bytes.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most `Pending` of this thread's latest groups are under way.
template <int Pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Brings the 128 bytes around an address into the L2 cache.
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from)); }

// Starts to copy rows 0..rows-1, columns 0..cols-1 of a matrix with unit column stride into a tile; what the
// matrix lacks of the tile is zero. `from` and `stride` (elements) are multiples of 16 bytes, cols too.
// Thread `thread` of `Threads` does its share.
template <int Threads, typename T, int Rows, int Cols>
__device__ inline void load_async(const SharedTile<T, Rows, Cols>& tile, const T* from, int64_t stride,
                                  int rows, int cols, int thread) {
  constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  constexpr int kPacks = Cols / kPack;  // a row's
  static_assert(Cols % kPack == 0);
  constexpr int kAll = Rows * kPacks;
#pragma unroll
  for (int i = 0; i < (kAll + Threads - 1) / Threads; ++i) {
    const int pack = thread + i * Threads;
    if (kAll % Threads != 0 && pack >= kAll) break;
    const int row = pack / kPacks, col = pack % kPacks * kPack;
    const bool valid = row < rows && col < cols;
    copy_async(tile.address(row, col), from + (valid ? row * stride + col : 0), valid);
  }
}

// A barrier of `threads` threads (a multiple of 32) among the 16 of a block; 0 is __syncthreads().
__device__ inline void barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace girih::kernels

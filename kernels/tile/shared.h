// Tiles of 16-bit or 32-bit elements in shared memory, and the asynchronous copies that fill them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "tile/ptx.h"

namespace girih::kernels {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same pointer to shared memory, computed once. Otherwise the compiler recomputes the address of a shared
// array in every iteration of a loop, which in kernels with clusters reads a slow special register.
template <typename T>
__device__ inline T* pin_address(T* shared) {
  uint32_t address = shared_address(shared);
  ptx::make_opaque(address);
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Rows x Cols elements with a 128-byte swizzle: rows of 64 to 512 bytes fill lines of 128 bytes, and the row
// permutes the 16-byte packs of a line. ldmatrix has no bank conflicts, and a copy of whole rows writes whole
// lines, which padded rows would not. `data` is aligned to 128 bytes.
template <typename T, int Rows, int Cols>
struct SharedTile {
  using Element = T;
  static constexpr int kRows = Rows;
  static constexpr int kCols = Cols;
  static constexpr int kBytes = Rows * Cols * static_cast<int>(sizeof(T));
  static constexpr unsigned kPack = 16 / sizeof(T);
  static constexpr unsigned kPacks = Cols / kPack;                // of a row
  static constexpr unsigned kLine = kPacks < 8 ? 8 / kPacks : 1;  // rows of a line
  static_assert(kPacks == 4 || kPacks == 8 || kPacks == 16 || kPacks == 32);

  T* data;

  __host__ __device__ static unsigned offset(unsigned row, unsigned col) {
    const unsigned swizzle = row / kLine % (kPacks < 8 ? kPacks : 8);
    return row * Cols + ((col / kPack) ^ swizzle) * kPack + col % kPack;
  }
  // The offset of (row + lane_row, col + lane_col). row and col are the same in all lanes; lane_row and
  // lane_col differ from lane to lane. row is a multiple of 8; col is a multiple of a pack and has no bit in
  // common with lane_col. So offset(lane_row, lane_col) is computed once for all rows and columns: col is
  // combined by xor, row by addition.
  __host__ __device__ static unsigned offset(unsigned row, unsigned col, unsigned lane_row,
                                             unsigned lane_col) {
    return (offset(lane_row, lane_col) ^ col) + row * Cols;
  }
  __device__ T& at(int row, int col) const { return data[offset(row, col)]; }
  __device__ T& at(int row, int col, int lane_row, int lane_col) const {
    return data[offset(row, col, lane_row, lane_col)];
  }
  // The tile from column `col`, a multiple of a line: the swizzle permutes packs within a line only.
  __device__ SharedTile from_column(int col) const { return {data + col}; }
  __device__ uint32_t address(int row, int col) const { return shared_address(data + offset(row, col)); }
  __device__ uint32_t address(int row, int col, int lane_row, int lane_col) const {
    return shared_address(data + offset(row, col, lane_row, lane_col));
  }
};

// A tile whose ldmatrix addresses are computed from two precomputed values, the address of the tile and the
// offset of the lane. Without them the compiler recomputes both after every barrier.
template <class Tile>
struct PrecomputedTile : Tile {
  uint32_t base, lane_offset;  // bytes; lane_offset: offset(0, 0, lane() & 15, (lane() >> 4) * 8)
  __device__ uint32_t address(int row, int col, int, int) const {
    constexpr int kBytes = sizeof(typename Tile::Element);
    return base + row * Tile::kCols * kBytes + (lane_offset ^ (col * kBytes));
  }
};

// Assigns consecutive ranges of shared memory to tiles and arrays.
struct SharedAllocator {
  unsigned char* next;

  __device__ explicit SharedAllocator(unsigned char* start) : next(start) {}

  template <class Tile>
  __device__ SharedAllocator& operator()(Tile& tile) {
    tile.data = reinterpret_cast<typename Tile::Element*>(next);
    next += Tile::kBytes;
    return *this;
  }
  template <class Number>
  __device__ SharedAllocator& operator()(Number*& array, int count) {
    array = reinterpret_cast<Number*>(next);
    next += count * sizeof(Number);
    return *this;
  }
};

// Starts a copy of 16 bytes from global to shared memory, or writes zeros if not `valid`.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  ptx::cp_async_16(to, from, valid ? 16 : 0);
}
// The same for 8 bytes.
__device__ inline void copy_async_8(uint32_t to, const void* from, bool valid) {
  ptx::cp_async_8(to, from, valid ? 8 : 0);
}
// The same for 4 bytes.
__device__ inline void copy_async_4(uint32_t to, const void* from, bool valid) {
  ptx::cp_async_4(to, from, valid ? 4 : 0);
}
__device__ inline void commit_copies() { ptx::cp_async_commit_group(); }
// Waits until at most the latest `Pending` groups of this thread are incomplete.
template <int Pending>
__device__ inline void wait_copies() {
  ptx::cp_async_wait_group<Pending>();
}

// Prefetches the 128 bytes around an address to the L2 cache.
__device__ inline void prefetch(const void* from) { ptx::prefetch_l2(from); }

// Copies tiles from the rows of one matrix, one share for each thread. The constructor computes what is the
// same for all tiles.
template <int Threads, class Tile>
class TileCopier {
  using T = typename Tile::Element;
  static constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  static constexpr int kPacks = Tile::kCols / kPack;  // of a row
  static constexpr int kStep = Threads / kPacks;      // rows between the packs of a thread
  static_assert(Threads % kPacks == 0 && Tile::kRows % kStep == 0);

  const T* from_;
  int64_t stride_;
  int row_, col_;
  bool valid_;

 public:
  // Copies columns 0..cols-1 of a matrix with unit column stride; further columns of the tile become zero.
  // `from`, `stride` (in elements) and `cols` are multiples of 16 bytes.
  __device__ TileCopier(const T* from, int64_t stride, int cols, int thread)
      : stride_(stride), row_(thread / kPacks), col_(thread % kPacks * kPack), valid_(col_ < cols) {
    from_ = from + row_ * stride + col_;
  }

  // Starts the copies of rows first_row..first_row+rows-1 of the matrix at from + offset; further rows become
  // zero.
  __device__ void start(const Tile& tile, int first_row, int rows, int64_t offset = 0) const {
    const T* from = from_ + first_row * stride_ + offset;
#pragma unroll
    for (int i = 0; i < Tile::kRows / kStep; ++i) {
      // A copy of zero bytes does not read its source.
      copy_async(tile.address(row_ + i * kStep, col_), from, valid_ && row_ + i * kStep < rows);
      from += kStep * stride_;
    }
  }
};

// Starts the copies of rows 0..rows-1 and columns 0..cols-1 of a matrix, as thread `thread` of `Threads`.
template <int Threads, class Tile>
__device__ inline void load_async(const Tile& tile, const typename Tile::Element* from, int64_t stride,
                                  int rows, int cols, int thread) {
  TileCopier<Threads, Tile>(from, stride, cols, thread).start(tile, 0, rows);
}

// Synchronises `threads` threads (a multiple of 32) at named barrier `id`, 0..15; barrier 0 is
// __syncthreads().
__device__ inline void named_barrier_sync(int id, int threads) { ptx::bar_sync(id, threads); }

// Racecheck of compute-sanitizer seems to count the barriers that a warp has passed, whatever their ids. If
// one warp has passed more barriers than another, racecheck reports a race between a write before a barrier
// of the block and a read after it. With -DGIRIH_RACECHECK=ON all warps pass the same number of barriers.
#ifdef GIRIH_RACECHECK
constexpr bool kHasEqualBarrierCounts = true;
#else
constexpr bool kHasEqualBarrierCounts = false;
#endif

// Initialises an mbarrier in shared memory: `arrivals` arrivals complete a phase.
__device__ inline void init_barrier(uint64_t* barrier, int arrivals) {
  ptx::mbarrier_init(shared_address(barrier), arrivals);
}
// Arrives once. Writes of the thread before the arrival are visible to threads that wait for the phase.
__device__ inline void arrive(uint64_t* barrier) { ptx::mbarrier_arrive(shared_address(barrier)); }
// One arrival of a whole warp, which releases the writes of all its lanes. Racecheck of compute-sanitizer
// does not see that the lanes that do not arrive are ordered before the arrival: with -DGIRIH_RACECHECK=ON
// all lanes arrive (except at the mbarriers of another block, cluster.h). arrival_count(warps): the number of
// arrivals of `warps` warps.
#ifdef GIRIH_RACECHECK
__host__ __device__ constexpr int arrival_count(int warps) { return 32 * warps; }
#else
__host__ __device__ constexpr int arrival_count(int warps) { return warps; }
#endif
__device__ inline void arrive_warp(uint64_t* barrier) {
  __syncwarp();
#ifdef GIRIH_RACECHECK
  arrive(barrier);
#else
  ptx::mbarrier_arrive_elected(shared_address(barrier));
#endif
}
// Arrives when all earlier cp.async copies of this thread are complete, without waiting for them. The copies
// are visible to threads that wait for the phase.
__device__ inline void arrive_after_copies(uint64_t* barrier) {
  ptx::cp_async_mbarrier_arrive_noinc(shared_address(barrier));
}
// Waits for the phase of this parity: 0 for the first phase of the mbarrier, 1 for the second, ...
__device__ inline void wait(uint64_t* barrier, unsigned parity) {
  const uint32_t address = shared_address(barrier);
  while (ptx::mbarrier_try_wait_parity(address, parity) == 0) {
  }
}

}  // namespace girih::kernels

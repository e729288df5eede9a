// Tiles of 16-bit or 32-bit elements in shared memory, and the asynchronous copies that fill them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace girih::kernels {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same place in shared memory by an address that is worked out once and kept. That of a block's own array
// a compiler works out anew in every turn of a loop, where there are clusters by a register that is slow to
// read.
template <typename T>
__device__ inline T* by_address(T* shared) {
  uint32_t address = shared_address(shared);
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Rows x Cols elements. Rows of 64 to 512 bytes fill lines of 128, and the 16-byte packs of a line change
// places with the row: ldmatrix meets no conflicts, and a copy of whole rows writes whole lines (of
// rows padded to avoid conflicts it would not). `data` is a multiple of 128 bytes.
template <typename T, int Rows, int Cols>
struct SharedTile {
  using Element = T;
  static constexpr int kRows = Rows;
  static constexpr int kCols = Cols;
  static constexpr int kBytes = Rows * Cols * static_cast<int>(sizeof(T));
  static constexpr unsigned kPack = 16 / sizeof(T);
  static constexpr unsigned kPacks = Cols / kPack;                // a row's
  static constexpr unsigned kLine = kPacks < 8 ? 8 / kPacks : 1;  // rows of a line
  static_assert(kPacks == 4 || kPacks == 8 || kPacks == 16 || kPacks == 32);

  T* data;

  __host__ __device__ static unsigned offset(unsigned row, unsigned col) {
    const unsigned turn = row / kLine % (kPacks < 8 ? kPacks : 8);
    return row * Cols + ((col / kPack) ^ turn) * kPack + col % kPack;
  }
  // Of (row + lane_row, col + lane_col), row and col the same for all lanes and multiples of 8 rows and of
  // whole packs past lane_col's. The lanes' part is one number however many rows and columns are visited: col
  // changes its bits, row is added.
  __host__ __device__ static unsigned offset(unsigned row, unsigned col, unsigned lane_row,
                                             unsigned lane_col) {
    return (offset(lane_row, lane_col) ^ col) + row * Cols;
  }
  __device__ T& at(int row, int col) const { return data[offset(row, col)]; }
  __device__ T& at(int row, int col, int lane_row, int lane_col) const {
    return data[offset(row, col, lane_row, lane_col)];
  }
  // The tile from a column on, a multiple of a line: packs change places within lines.
  __device__ SharedTile from_column(int col) const { return {data + col}; }
  __device__ uint32_t address(int row, int col) const { return shared_address(data + offset(row, col)); }
  __device__ uint32_t address(int row, int col, int lane_row, int lane_col) const {
    return shared_address(data + offset(row, col, lane_row, lane_col));
  }
};

// A tile whose addresses for ldmatrix hang on two numbers that are at hand, those of its start and of the
// lane's place: behind a barrier the compiler would work them out again.
template <class Tile>
struct PlacedTile : Tile {
  uint32_t start, place;  // in bytes; place: of offset(0, 0, lane() & 15, (lane() >> 4) * 8)
  __device__ uint32_t address(int row, int col, int, int) const {
    constexpr int kBytes = sizeof(typename Tile::Element);
    return start + row * Tile::kCols * kBytes + (place ^ (col * kBytes));
  }
};

// Gives out shared memory piece by piece.
struct Layout {
  unsigned char* next;

  __device__ explicit Layout(unsigned char* start) : next(start) {}

  template <class Tile>
  __device__ Layout& operator()(Tile& tile) {
    tile.data = reinterpret_cast<typename Tile::Element*>(next);
    next += Tile::kBytes;
    return *this;
  }
  template <class Number>
  __device__ Layout& operator()(Number*& array, int count) {
    array = reinterpret_cast<Number*>(next);
    next += count * sizeof(Number);
    return *this;
  }
};

// 16 bytes from global to shared memory, or 16 zero bytes.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes));
}
// 8 bytes, or zero.
__device__ inline void copy_async_8(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(to), "l"(from), "r"(bytes));
}
// 4 bytes, or zero.
__device__ inline void copy_async_4(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most `Pending` of this thread's latest groups are under way.
template <int Pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Brings the 128 bytes around an address into the L2 cache.
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from)); }

// A thread's share in copying one tile after another out of the rows of one matrix: what does not change from
// tile to tile is worked out once.
template <int Threads, class Tile>
class TileCopier {
  using T = typename Tile::Element;
  static constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  static constexpr int kPacks = Tile::kCols / kPack;  // a row's
  static constexpr int kStep = Threads / kPacks;      // rows from one of the thread's packs to the next
  static_assert(Threads % kPacks == 0 && Tile::kRows % kStep == 0);

  const T* from_;
  int64_t stride_;
  int row_, col_;
  bool valid_;

 public:
  // Columns 0..cols-1 of a matrix with unit column stride; what it lacks of a tile is zero. `from` and
  // `stride` (elements) are multiples of 16 bytes, cols too.
  __device__ TileCopier(const T* from, int64_t stride, int cols, int thread)
      : stride_(stride), row_(thread / kPacks), col_(thread % kPacks * kPack), valid_(col_ < cols) {
    from_ = from + row_ * stride + col_;
  }

  // Rows first..first+rows-1 of the matrix that starts `offset` elements further.
  __device__ void start(const Tile& tile, int first, int rows, int64_t offset = 0) const {
    const T* from = from_ + first * stride_ + offset;
#pragma unroll
    for (int i = 0; i < Tile::kRows / kStep; ++i) {
      // A copy of no bytes does not touch its source.
      copy_async(tile.address(row_ + i * kStep, col_), from, valid_ && row_ + i * kStep < rows);
      from += kStep * stride_;
    }
  }
};

// Rows 0..rows-1, columns 0..cols-1 of a matrix, by thread `thread` of `Threads`.
template <int Threads, class Tile>
__device__ inline void load_async(const Tile& tile, const typename Tile::Element* from, int64_t stride,
                                  int rows, int cols, int thread) {
  TileCopier<Threads, Tile>(from, stride, cols, thread).start(tile, 0, rows);
}

// A barrier of `threads` threads (a multiple of 32) among the 16 of a block; 0 is __syncthreads().
__device__ inline void barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Racecheck of compute-sanitizer seems to count how many barriers a warp has been at, whichever they were,
// and reports what one warp wrote before a barrier of all and another reads after it where the first had met
// others once more: with -DGIRIH_RACECHECK=ON delta_product's gradients have been at equally many in all
// warps.
#ifdef GIRIH_RACECHECK
constexpr bool kCountsBarriers = true;
#else
constexpr bool kCountsBarriers = false;
#endif

// A barrier in shared memory: `arrivals` complete a phase. For a producer that does not wait for its
// consumer.
__device__ inline void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// What the thread wrote before is seen by whoever waits for the phase.
__device__ inline void arrive(uint64_t* barrier) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(shared_address(barrier))
      : "memory");
}
// One arrival, by all of a warp: the same for what any of its threads wrote. Racecheck of compute-sanitizer
// does not see that those that do not arrive themselves have come before: with -DGIRIH_RACECHECK=ON they do
// (but at another block's barriers, cluster.h).
// once(warps): the arrivals of so many warps.
#ifdef GIRIH_RACECHECK
__host__ __device__ constexpr int once(int warps) { return 32 * warps; }
#else
__host__ __device__ constexpr int once(int warps) { return warps; }
#endif
__device__ inline void arrive_once(uint64_t* barrier) {
  __syncwarp();
#if defined(GIRIH_RACECHECK)
  arrive(barrier);
#elif __CUDA_ARCH__ >= 900
  // (Asked for their number, lanes have to read it again, where registers are few.)
  asm volatile(
      "{\n.reg .pred first;\n.reg .b64 state;\nelect.sync _|first, 0xffffffff;\n"
      "@first mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(shared_address(barrier))
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred first;\n.reg .b64 state;\nsetp.eq.u32 first, %1, 0;\n"
      "@first mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(shared_address(barrier)),
      "r"(threadIdx.x & 31)
      : "memory");
#endif
}
// arrive() once this thread's copies so far have arrived, without a wait for them: its copies and those of
// all who arrive so are seen by whoever waits for the phase.
__device__ inline void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
// Waits for the barrier's phase of this parity: 0 for its first, 1 for its second, ...
__device__ inline void wait(uint64_t* barrier, unsigned parity) {
  const uint32_t address = shared_address(barrier);
  unsigned done = 0;
  while (done == 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#endif
  }
}

// A place in a ring of such barriers, and the parity of its turn.
struct Turn {
  int place = 0;
  unsigned parity = 0;

  __device__ void next(int size) {
    if (++place == size) place = 0, parity ^= 1;
  }
  __device__ void skip(int places, int size) {  // size at most
    place += places;
    if (place >= size) place -= size, parity ^= 1;
  }
};

}  // namespace girih::kernels

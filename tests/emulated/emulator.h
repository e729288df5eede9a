// What a kernel's source asks of CUDA, on a CPU: so that kernels run, and their arithmetic is tested, where
// there is no GPU. A block's threads are fibers of one thread. Warps take turns in a random order; copies
// that are under way arrive no sooner than somebody waits for them; shared memory begins full of NaN.
//
// rewrite.py puts this in the place of the instructions in kernels/tile. It knows no speed, no second block
// at the same time but those of a cluster, and of races those that a turn of warps brings out.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

namespace emulated {

constexpr int kSharedBytes = 232448;  // what a block of sm_90 may have
constexpr int kSharedRoom = 1 << 20;  // more, to see who writes beyond
constexpr int kStackBytes = 256 << 10;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated: %s\n", what);
  std::abort();
}

struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes;
};

struct Block;
struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on
  char* stack;
  Block* block;
  unsigned thread;
  bool begun, done;
  unsigned exchanges;                          // that it has taken part in with its warp
  std::vector<Copy> open;                      // copies that no group has yet
  std::vector<std::vector<Copy>> groups;       // oldest first
  std::deque<std::function<void()>> products;  // under way (products.h), oldest first
};

// What a warp's lanes hand to one another: two tables in turn.
struct Warp {
  unsigned arrived[2], finished;
  uint64_t table[2][32][8];
};

struct Barrier {
  int arrived;
  unsigned phase;
};

struct Block {
  unsigned number;
  unsigned char* shared = nullptr;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<Fiber*> fibers;  // as many as any block had
};

// What one block of a cluster sends to another.
struct Parcel {
  unsigned char *to, *from;
  int bytes;
  uint64_t* barrier;
};

inline jmp_buf scheduler;
inline Block cluster[2];
inline int cluster_size, threads, grid;
inline Barrier cluster_barrier;
inline Fiber* current;
inline std::function<void()> kernel;
inline std::mt19937 random_turns(1);
inline std::vector<Parcel> parcels;  // on their way, oldest first

// (swapcontext() asks the system for signals every time.)
inline void yield() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
// Runs the current fiber until it yields.
[[gnu::noinline]] inline void go_on() {
  if (_setjmp(scheduler) != 0) return;
  if (current->begun) _longjmp(current->place, 1);
  current->begun = true;
  setcontext(&current->context);
}
inline int lane() { return static_cast<int>(current->thread & 31); }

// Every lane leaves n words and gets the table of all.
inline uint64_t (*exchange(const uint64_t* words, int n))[8] {
  Warp& warp = current->block->warps[current->thread / 32];
  const unsigned number = current->exchanges++, which = number & 1;
  for (int i = 0; i < n; ++i) warp.table[which][lane()][i] = words[i];
  if (++warp.arrived[which] == 32) warp.arrived[which] = 0, warp.finished = number + 1;
  while (static_cast<int>(warp.finished - (number + 1)) < 0) yield();
  return warp.table[which];
}

template <class T>
T from_lane(T x, int source) {
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof x);
  const auto table = exchange(&word, 1);
  T result;
  std::memcpy(&result, &table[source & 31][0], sizeof result);
  return result;
}

inline void wait_at(Barrier& barrier, int arrivals) {
  const unsigned phase = barrier.phase;
  if (++barrier.arrived == arrivals) {
    barrier.arrived = 0, ++barrier.phase;
  } else {
    while (barrier.phase == phase) yield();
  }
}

inline void wait_at(int id, int arrivals) { wait_at(current->block->barriers[id], arrivals); }

inline void start_copy(uint32_t to, const void* from, int bytes) {
  if (from != nullptr && reinterpret_cast<uint64_t>(from) % bytes != 0)
    fail("a copy's source is not aligned");
  current->open.push_back({reinterpret_cast<void*>(uint64_t{to}), from, bytes});
}
inline void close_group() {
  current->groups.push_back(current->open);
  current->open.clear();
}
inline void finish_groups(size_t left) {
  auto& groups = current->groups;
  for (; groups.size() > left; groups.erase(groups.begin())) {
    for (const Copy& copy : groups.front()) {
      std::memset(copy.to, 0, copy.bytes);
      if (copy.from != nullptr) std::memcpy(copy.to, copy.from, copy.bytes);
    }
  }
}

// A barrier in shared memory: arrivals left and in all, and phases gone by.
struct Phases {
  uint16_t left, all;
  uint32_t phase;
};
inline Phases& phases(uint64_t* barrier) { return *reinterpret_cast<Phases*>(barrier); }
inline void arrive(uint64_t* barrier) {
  Phases& of = phases(barrier);
  if (--of.left == 0) of.left = of.all, ++of.phase;
}

// What others bring to shared memory while a block runs, in any order (copy_engine.h).
inline std::vector<std::function<void()>> deliveries;
inline void deliver_any() {
  const auto at = deliveries.begin() + random_turns() % deliveries.size();
  const std::function<void()> delivery = *at;
  deliveries.erase(at);
  delivery();
}

inline void run_fiber() {
  kernel();
  if (!current->products.empty()) fail("a thread has ended before its products");
  current->done = true;
  yield();
}

// Where another block of the cluster has what the block has here.
inline unsigned char* far(const void* here, int rank) {
  return cluster[rank].shared + (static_cast<const unsigned char*>(here) - current->block->shared);
}
inline void send(const void* from, int bytes, const uint64_t* barrier, int rank) {
  if (reinterpret_cast<uint64_t>(from) % 16 != 0 || bytes % 16 != 0) fail("a parcel is not aligned");
  parcels.push_back({far(from, rank), const_cast<unsigned char*>(static_cast<const unsigned char*>(from)),
                     bytes, reinterpret_cast<uint64_t*>(far(barrier, rank))});
}
inline void deliver() {
  const Parcel parcel = parcels.front();
  parcels.erase(parcels.begin());
  std::memcpy(parcel.to, parcel.from, parcel.bytes);
  arrive(parcel.barrier);
}

inline void begin(Block& block, unsigned number) {
  if (block.shared == nullptr) {  // below 4 GiB: addresses have 32 bits
    block.shared = static_cast<unsigned char*>(
        mmap(nullptr, kSharedRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0));
  }
  std::memset(block.shared, 0xff, kSharedRoom);  // NaN
  block.number = number;
  block.warps.assign(threads / 32, Warp{});
  std::fill(std::begin(block.barriers), std::end(block.barriers), Barrier{});
  while (block.fibers.size() < static_cast<size_t>(threads)) {
    block.fibers.push_back(new Fiber{});
    block.fibers.back()->stack = static_cast<char*>(std::malloc(kStackBytes));
  }
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = *block.fibers[i];
    fiber.block = &block, fiber.thread = i, fiber.begun = fiber.done = false, fiber.exchanges = 0;
    fiber.open.clear(), fiber.groups.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack, 0, kStackBytes};
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

// Blocks number * cluster_size and on.
inline void run_cluster(unsigned number, int bytes) {
  if (bytes > kSharedBytes) fail("a block asks for more shared memory than there is");
  cluster_barrier = {};
  for (int i = 0; i < cluster_size; ++i) begin(cluster[i], number * cluster_size + i);
  for (long turns = 0;; ++turns) {
    std::vector<Fiber**> running;  // warps, by their first lane
    for (int i = 0; i < cluster_size; ++i) {
      for (int w = 0; w < threads / 32; ++w) {
        Fiber** first = &cluster[i].fibers[32 * w];
        if (!std::all_of(first, first + 32, [](const Fiber* f) { return f->done; })) running.push_back(first);
      }
    }
    if (running.empty()) break;
    if (turns > 20'000'000) fail("a block hangs");
    if (!parcels.empty() && random_turns() % 8 == 0) deliver();
    if (!deliveries.empty() && random_turns() % 4 == 0) deliver_any();
    Fiber** warp = running[random_turns() % running.size()];
    for (int l = 0; l < 32; ++l) {
      current = warp[l];
      if (!current->done) go_on();
    }
  }
  if (!parcels.empty() || !deliveries.empty()) fail("a block has ended before what it was sent");
  for (int i = 0; i < cluster_size; ++i) {
    for (int at = bytes; at < kSharedRoom; ++at) {
      if (cluster[i].shared[at] != 0xff) fail("a block writes beyond its shared memory");
    }
  }
}

template <class F>
void launch(const F& f, unsigned blocks, int threads_, int bytes, int cluster_size_ = 1) {
  kernel = f, threads = threads_, cluster_size = cluster_size_, grid = static_cast<int>(blocks);
  if (blocks % cluster_size != 0) fail("a cluster is not complete");
  for (unsigned i = 0; i < blocks / cluster_size; ++i) run_cluster(i, bytes);
}

// Products of 16-bit elements by their place in the lanes' registers (tile/matrix.h), summed in fp64.
template <class Unpaired>
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Unpaired& unpaired) {
  const uint64_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto table = exchange(words, 6);
  const auto element = [&](uint64_t pair, int which) {
    const float2 both = unpaired(static_cast<uint32_t>(pair));
    return static_cast<double>(which ? both.y : both.x);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + 8 * (i / 2), col = 2 * (lane() % 4) + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      sum += element(table[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], k % 2) *
             element(table[col * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    d[i] = static_cast<float>(sum);
  }
  uint64_t nothing = 0;
  exchange(&nothing, 1);
}

// ldmatrix: four 8 x 8 matrices whose rows start at the lanes' addresses.
inline void load_matrices(uint32_t (&to)[4], uint32_t address, bool transposed) {
  const uint64_t word = address;
  const auto table = exchange(&word, 1);
  const auto element = [&](int matrix, int row, int col) {
    return reinterpret_cast<const uint16_t*>(table[8 * matrix + row][0])[col];
  };
  uint32_t got[4];
  for (int m = 0; m < 4; ++m) {
    const int row = lane() / 4, col = 2 * (lane() % 4);
    const uint32_t low = transposed ? element(m, col, row) : element(m, row, col),
                   high = transposed ? element(m, col + 1, row) : element(m, row, col + 1);
    got[m] = low | high << 16;
  }
  std::copy(got, got + 4, to);
  uint64_t nothing = 0;
  exchange(&nothing, 1);
}

inline uint32_t transpose_pairs(uint32_t x) {
  const uint64_t word = x;
  const auto table = exchange(&word, 1);
  const auto element = [&](int row, int col) {
    return static_cast<uint32_t>(table[4 * row + col / 2][0] >> 16 * (col % 2)) & 0xffff;
  };
  const int row = lane() / 4, col = 2 * (lane() % 4);
  return element(col, row) | element(col + 1, row) << 16;
}

struct Index {
  unsigned x;
};

}  // namespace emulated

#define threadIdx \
  emulated::Index { emulated::current->thread }
#define gridDim \
  emulated::Index { static_cast<unsigned>(emulated::grid) }
#define blockIdx \
  emulated::Index { emulated::current->block->number }

#define blockDim \
  emulated::Index { static_cast<unsigned>(emulated::threads) }

inline void __syncthreads() { emulated::wait_at(0, emulated::threads); }
inline void __syncwarp(unsigned = ~0u) {
  uint64_t nothing = 0;
  emulated::exchange(&nothing, 1);
}
template <class T>
T __shfl_sync(unsigned, T x, int source) {
  return emulated::from_lane(x, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulated::from_lane(x, emulated::lane() ^ mask);
}
inline bool __any_sync(unsigned, bool x) {
  const uint64_t word = x;
  const auto table = emulated::exchange(&word, 1);
  return std::any_of(table, table + 32, [](const auto& of) { return of[0] != 0; });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
  return emulated::from_lane(x,
                             std::max(emulated::lane() - by, emulated::lane() < by ? emulated::lane() : 0));
}
template <class T>
T __shfl_down_sync(unsigned, T x, int by) {
  return emulated::from_lane(x, emulated::lane() + by < 32 ? emulated::lane() + by : emulated::lane());
}
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
// What a compiler may not make one operation of with another.
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
using std::max;
using std::min;

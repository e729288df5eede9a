// Runs CUDA kernels on a CPU, to test their arithmetic and synchronization without a GPU.
//
// - Every thread of a block is a fiber; all fibers run in one CPU thread. The scheduler picks warps and lanes
//   in random order and stalls random warps and lanes for a while. A thread that omits a wait then reads data
//   that is not yet written.
// - An asynchronous copy or product takes effect as late as its waits allow.
// - Shared memory is initialized with NaN.
//
// The compiler includes this file before each source (tests/support/emulated.py) and compiles the source with
// the macros of nvcc for sm_90a. tile/ptx.h and tile/cuts.h in this folder replace the headers of the same
// names in kernels/. runtime.h replaces the CUDA runtime.
//
// Limits: the emulator does not model time. Blocks run one after another, except the blocks of a cluster. A
// race is detected only if a schedule of warps and lanes changes the result.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define __noinline__
#undef __shared__
#define __shared__ static thread_local  // initialized by StaticShared

namespace emulated {

constexpr int kSharedBytes = 232448;        // maximum shared memory of a block on sm_90
constexpr int kSharedAllocation = 1 << 20;  // larger, to detect writes beyond the block's shared memory
constexpr int kStackBytes = 256 << 10;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated: %s\n", what);
  std::abort();
}

// A cp.async. The first `source_bytes` bytes are copied, the others are set to zero.
struct Copy {
  void* destination;
  const void* source;  // null: all bytes are set to zero
  int bytes, source_bytes;
};

// The address and value of accumulators when pin_registers() was called (wgmma.h).
struct PinnedAccumulators {
  const char* begin;
  std::vector<char> bytes;

  const char* end() const { return begin + bytes.size(); }
};

struct Block;
struct Fiber {
  ucontext_t context;    // the entry point
  jmp_buf resume_point;  // set by yield()
  char* stack;
  Block* block;
  unsigned thread;
  bool has_started, is_done;
  // The fiber waits while (*word & mask) == value. Null: the fiber does not wait.
  const unsigned* word;
  unsigned mask, value;
  unsigned exchanges;                          // number of calls of exchange()
  std::vector<Copy> open_copies;               // not yet in a group
  std::vector<std::vector<Copy>> copy_groups;  // oldest first
  std::deque<std::function<void()>> products;  // pending wgmma instructions, oldest first; null ends a group
  // Checks of wgmma.fence (wgmma.h).
  std::vector<char> fenced_registers;          // the fiber's stack at the last fence
  bool has_fence;                              // a fence came after the last wait
  std::set<const void*> started_accumulators;  // accumulators of the products since the last fence
  std::vector<PinnedAccumulators> pinned_accumulators;
};

// The tables of exchange(). Consecutive exchanges alternate between them.
struct Warp {
  unsigned stalled_lanes;        // one bit per lane
  unsigned arrived[2];           // lanes that have written to the table
  unsigned completed_exchanges;  // by all 32 lanes
  int line[2];                   // source line of the exchange
  uint64_t table[2][32][8];
};

struct Barrier {
  int arrived;
  unsigned phase;
};

struct Block {
  unsigned number;
  int running_warps;
  unsigned char* shared = nullptr;
  // Shared memory as the async proxy (wgmma and TMA) sees it. A fence of the async proxy copies `shared` to
  // `async_shared` at the end of the turn of the fencing warp.
  unsigned char* async_shared = nullptr;
  bool has_async_fence;  // in the current turn
  std::vector<Warp> warps;
  Barrier barriers[16];
  bool all[2];                 // result of __syncthreads_and(), by the parity of the phase of barrier 0
  std::vector<Fiber*> fibers;  // reused by later blocks
};

// Attributes of the emulated device.
inline int shared_bytes = kSharedBytes;  // maximum shared memory of a block
inline int processors = 4;               // multiprocessors
// The current device. The launchers cache the architecture of a device by its number.
enum : int { kSm90, kSm80 };
inline int device = kSm90;
// Random groups of wgmma complete when they are committed (wgmma.h).
inline bool has_early_products = false;
inline jmp_buf scheduler;
inline Block cluster[2];
inline int cluster_size, threads, grid, block_bytes;
inline Barrier cluster_barrier;
inline Fiber* current;
inline std::function<void()> kernel;
inline std::mt19937 random_engine(1);

// setjmp and longjmp, because swapcontext() makes a system call for the signal mask every time.
inline void yield() {
  if (_setjmp(current->resume_point) == 0) _longjmp(scheduler, 1);
}
// Yields while (word & mask) == value.
inline void yield_while(const unsigned& word, unsigned mask, unsigned value) {
  current->word = &word, current->mask = mask, current->value = value;
  while ((word & mask) == value) yield();
  current->word = nullptr;
}
inline bool is_waiting(const Fiber& fiber) {
  return fiber.word != nullptr && (*fiber.word & fiber.mask) == fiber.value;
}
// Runs the current fiber until it yields.
[[gnu::noinline]] inline void resume() {
  if (_setjmp(scheduler) != 0) return;
  if (current->has_started) _longjmp(current->resume_point, 1);
  current->has_started = true;
  setcontext(&current->context);
}
inline int lane() { return static_cast<int>(current->thread & 31); }

inline Warp& warp_of(const Fiber& fiber) { return fiber.block->warps[fiber.thread / 32]; }

// Writes n words of every lane to a table and returns the table of all lanes, [lane][word]. All lanes have to
// call exchange() from the same source line. Diverged lanes are not detected if their exchanges have the same
// line.
inline uint64_t (*exchange(const uint64_t* words, int n, int line))[8] {
  Warp& warp = warp_of(*current);
  const unsigned number = current->exchanges++, parity = number & 1;
  if (warp.arrived[parity] == 0) warp.line[parity] = line;
  if (warp.line[parity] != line) fail("the lanes of a warp diverge at an exchange");
  for (int i = 0; i < n; ++i) warp.table[parity][lane()][i] = words[i];
  if (++warp.arrived[parity] == 32) warp.arrived[parity] = 0, warp.completed_exchanges = number + 1;
  while (static_cast<int>(warp.completed_exchanges - (number + 1)) < 0)
    yield_while(warp.completed_exchanges, ~0u, warp.completed_exchanges);
  return warp.table[parity];
}

template <class T>
T shuffle(T x, int source, int line) {
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof x);
  const auto table = exchange(&word, 1, line);
  T result;
  std::memcpy(&result, &table[source & 31][0], sizeof result);
  return result;
}

inline void arrive_and_wait(Barrier& barrier, int arrivals) {
  const unsigned phase = barrier.phase;
  if (++barrier.arrived == arrivals) {
    barrier.arrived = 0, ++barrier.phase;
  } else {
    yield_while(barrier.phase, ~0u, phase);
  }
}

inline void arrive_and_wait(int id, int arrivals) { arrive_and_wait(current->block->barriers[id], arrivals); }

inline void start_copy(uint32_t to, const void* from, int bytes, int source_bytes) {
  if (source_bytes == 0) from = nullptr;
  if (reinterpret_cast<uint64_t>(from) % bytes != 0) fail("a copy's source is not aligned");
  current->open_copies.push_back({reinterpret_cast<void*>(uint64_t{to}), from, bytes, source_bytes});
}
inline void commit_copy_group() {
  current->copy_groups.push_back(current->open_copies);
  current->open_copies.clear();
}
// Performs the copies of the oldest groups until `pending` groups remain.
inline void wait_copy_groups(size_t pending) {
  auto& groups = current->copy_groups;
  if (groups.size() > pending && random_engine() % 256 == 0) {  // delays the copies of this lane only
    for (unsigned turns = random_engine() % 256; turns > 0; --turns) yield();
  }
  for (; groups.size() > pending; groups.erase(groups.begin())) {
    for (const Copy& copy : groups.front()) {
      std::memset(copy.destination, 0, copy.bytes);
      if (copy.source != nullptr) std::memcpy(copy.destination, copy.source, copy.source_bytes);
    }
  }
}

// An mbarrier in shared memory. A thread has to wait for every phase before the next phase completes, as in
// synccheck of compute-sanitizer.
struct Mbarrier {
  uint16_t pending_arrivals, arrival_count : 14;
  uint16_t awaited : 2;  // bit p: a thread has waited for the phase of parity p
  uint32_t phase;        // number of completed phases
};
inline Mbarrier& mbarrier(uint64_t* barrier) { return *reinterpret_cast<Mbarrier*>(barrier); }
inline void complete_phase(Mbarrier& barrier) {
  const int previous = barrier.phase % 2 == 0 ? 2 : 1;
  if (barrier.phase > 0 && (barrier.awaited & previous) == 0)
    fail("no thread waits for a phase of a barrier");
  barrier.awaited &= ~previous, barrier.pending_arrivals = barrier.arrival_count, ++barrier.phase;
}
// The tx-count of every mbarrier: bytes that bulk copies have not written yet (tma.h).
inline std::map<uint64_t*, int> pending_bytes;
// Adds bytes to the tx-count, then arrives `arrivals` times.
inline void update_barrier(uint64_t* address, int bytes, int arrivals) {
  Mbarrier& barrier = mbarrier(address);
  int& tx_count = pending_bytes[address];
  tx_count += bytes, barrier.pending_arrivals -= arrivals;
  if (barrier.pending_arrivals == 0 && tx_count == 0) complete_phase(barrier);
}
inline void arrive(uint64_t* address) {
  if (!pending_bytes.empty()) return update_barrier(address, 0, 1);
  Mbarrier& barrier = mbarrier(address);
  if (--barrier.pending_arrivals == 0) complete_phase(barrier);
}
inline void wait_phase(uint64_t* address, uint32_t parity) {
  Mbarrier& barrier = mbarrier(address);
  barrier.awaited |= 1 << parity;
  yield_while(barrier.phase, 1, parity);
}

// Pending bulk copies to shared memory (tma.h). They complete in random order.
inline std::vector<std::function<void()>> bulk_copies;
inline void complete_random_bulk_copy() {
  const auto position = bulk_copies.begin() + random_engine() % bulk_copies.size();
  const std::function<void()> copy = *position;
  bulk_copies.erase(position);
  copy();
}

inline void run_fiber() {
  kernel();
  if (!current->products.empty()) fail("a thread exits before its wgmma complete");
  current->is_done = true;
  yield();
}

// The address in async_shared that corresponds to an address in shared memory.
inline unsigned char* async_address(const void* shared) {
  for (int i = 0; i < cluster_size; ++i) {
    const auto offset = static_cast<const unsigned char*>(shared) - cluster[i].shared;
    if (offset >= 0 && offset < block_bytes) return cluster[i].async_shared + offset;
  }
  fail("wgmma or a bulk copy accesses memory beyond shared memory");
}
inline void fence_async_proxy() { current->block->has_async_fence = true; }

// mapa: the corresponding address in the shared memory of another block of the cluster.
inline unsigned char* remote_address(const void* shared, int rank) {
  if (cluster[rank].running_warps == 0) fail("a block accesses the shared memory of a block that has exited");
  return cluster[rank].shared + (static_cast<const unsigned char*>(shared) - current->block->shared);
}

// The __shared__ arrays of a kernel are thread-local variables of the library, which has no others. All
// blocks use the same variables, so the kernels of a cluster must not have __shared__ arrays.
class StaticShared {
  unsigned char* begin_ = nullptr;
  size_t bytes_ = 0;

  static int find_variables(dl_phdr_info* info, size_t, void* result) {
    auto& variables = *static_cast<StaticShared*>(result);
    const auto own_address = reinterpret_cast<uint64_t>(&StaticShared::find_variables);
    bool is_own_library = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& header = info->dlpi_phdr[i];
      const uint64_t begin = info->dlpi_addr + header.p_vaddr;
      if (header.p_type == PT_LOAD)
        is_own_library |= own_address >= begin && own_address < begin + header.p_memsz;
      if (header.p_type == PT_TLS) bytes = header.p_memsz;
    }
    if (is_own_library)
      variables.begin_ = static_cast<unsigned char*>(info->dlpi_tls_data), variables.bytes_ = bytes;
    return is_own_library;
  }

 public:
  StaticShared() {
    static thread_local volatile char variable;
    variable = 0;  // the first access allocates the thread-local variables
    dl_iterate_phdr(find_variables, this);
    if (begin_ == nullptr) fail("the thread-local variables are not found");
  }
  void clear() const { std::memset(begin_, 0xff, bytes_); }  // NaN
  bool is_clear() const { return *begin_ == 0xff && std::memcmp(begin_, begin_ + 1, bytes_ - 1) == 0; }
};

inline void start_block(Block& block, unsigned number) {
  if (block.shared == nullptr) {
    // Below 4 GiB, because addresses in shared memory have 32 bits. Aligned to kSharedAllocation, because the
    // addresses in wgmma descriptors have 18 bits.
    const auto pages = reinterpret_cast<uint64_t>(mmap(nullptr, 2 * kSharedAllocation, PROT_READ | PROT_WRITE,
                                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0));
    block.shared = reinterpret_cast<unsigned char*>((pages + kSharedAllocation - 1) / kSharedAllocation *
                                                    kSharedAllocation);
    block.async_shared = static_cast<unsigned char*>(std::malloc(kSharedBytes));
  }
  std::memset(block.shared, 0xff, kSharedAllocation);  // NaN
  std::memset(block.async_shared, 0xff, block_bytes);
  block.has_async_fence = false;
  block.number = number, block.running_warps = threads / 32;
  block.warps.assign(threads / 32, Warp{});
  std::fill(std::begin(block.barriers), std::end(block.barriers), Barrier{});
  while (block.fibers.size() < static_cast<size_t>(threads)) {
    block.fibers.push_back(new Fiber{});
    block.fibers.back()->stack = static_cast<char*>(std::malloc(kStackBytes));
  }
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = *block.fibers[i];
    fiber.block = &block, fiber.thread = i, fiber.has_started = fiber.is_done = false, fiber.exchanges = 0;
    fiber.word = nullptr;
    fiber.open_copies.clear(), fiber.copy_groups.clear();
    fiber.pinned_accumulators.clear(), fiber.has_fence = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack, 0, kStackBytes};
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

// Runs the blocks [number * cluster_size, (number + 1) * cluster_size).
inline void run_cluster(unsigned number, int bytes) {
  if (bytes > shared_bytes) fail("a block has more shared memory than the device allows");
  cluster_barrier = {}, block_bytes = bytes;
  for (int i = 0; i < cluster_size; ++i) start_block(cluster[i], number * cluster_size + i);
  static const StaticShared static_shared;
  static_shared.clear();
  std::vector<Fiber**> running;  // the first lane of every warp that runs
  for (int i = 0; i < cluster_size; ++i) {
    for (int w = 0; w < threads / 32; ++w) running.push_back(&cluster[i].fibers[32 * w]);
  }
  long next_stall = 0;    // turn in which other warps and lanes are stalled
  size_t idle_turns = 0;  // turns since a fiber last ran
  for (long turns = 0; !running.empty(); ++turns) {
    // Stalls whole warps (1 in 8) and random lanes of warps (2 in 8). The other warps and lanes run ahead
    // until they wait for the stalled ones.
    if (turns >= next_stall || idle_turns > 8 * running.size()) {
      for (Fiber** warp : running) {
        const unsigned choice = random_engine() % 8;
        warp_of(**warp).stalled_lanes = choice == 0 ? ~0u : choice <= 2 ? random_engine() : 0;
      }
      next_stall = turns + (64 << random_engine() % 10), idle_turns = 0;
    }
    if (turns > 20'000'000) fail("a block hangs");
    if (!bulk_copies.empty() && random_engine() % 4 == 0) complete_random_bulk_copy();
    const auto position = running.begin() + random_engine() % running.size();
    Fiber** const warp = *position;
    ++idle_turns;
    const unsigned stalled_lanes = warp_of(**warp).stalled_lanes, first_lane = random_engine() % 32;
    if (stalled_lanes == ~0u) continue;
    bool is_done = true;
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned l = i ^ first_lane;
      current = warp[l];
      if (!current->is_done && !is_waiting(*current) && (stalled_lanes >> l & 1) == 0)
        idle_turns = 0, resume();
      is_done &= current->is_done;
    }
    Block& block = *warp[0]->block;
    if (block.has_async_fence) std::memcpy(block.async_shared, block.shared, bytes);
    block.has_async_fence = false;
    if (is_done) --block.running_warps, running.erase(position);
  }
  if (cluster_size > 1 && !static_shared.is_clear()) fail("a kernel of a cluster has __shared__ arrays");
  if (!bulk_copies.empty()) fail("a block exits before its bulk copies complete");
  for (int i = 0; i < cluster_size; ++i) {
    const unsigned char* const beyond = cluster[i].shared + bytes;
    if (*beyond != 0xff || std::memcmp(beyond, beyond + 1, kSharedAllocation - bytes - 1) != 0)
      fail("a block writes beyond its shared memory");
  }
}

// Seeds the schedule by the name of the test. The schedule does not depend on the tests that ran before.
inline void seed_schedule() {
  static std::string last_test;
  const char* const test = std::getenv("PYTEST_CURRENT_TEST");
  if (test == nullptr || last_test == test) return;
  last_test = test;
  std::seed_seq seed(last_test.begin(), last_test.end());
  random_engine.seed(seed);
}

template <class F>
void launch(const F& f, unsigned blocks, int threads_, int bytes, int cluster_size_ = 1) {
  seed_schedule();
  kernel = f, threads = threads_, cluster_size = cluster_size_, grid = static_cast<int>(blocks);
  if (blocks % cluster_size != 0) fail("the number of blocks is not a multiple of the cluster size");
  for (unsigned i = 0; i < blocks / cluster_size; ++i) run_cluster(i, bytes);
}

// mma.m16n8k16 of 16-bit elements, accumulated in fp64. tile/matrix.h describes the fragments.
template <class T>
float2 unpack(uint32_t pair) {
  T both[2];
  std::memcpy(both, &pair, sizeof pair);
  return {static_cast<float>(both[0]), static_cast<float>(both[1])};
}
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t pairs[6] = {a[0], a[1], a[2], a[3], b0, b1};
  uint64_t words[6];
  for (int i = 0; i < 6; ++i) {
    const float2 both = unpack<T>(pairs[i]);
    std::memcpy(&words[i], &both, sizeof both);
  }
  const auto table = exchange(words, 6, __LINE__);
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + 8 * (i / 2), col = 2 * (lane() % 4) + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k += 2) {
      float2 left, right;
      std::memcpy(&left, &table[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], sizeof left);
      std::memcpy(&right, &table[col * 4 + k % 8 / 2][4 + k / 8], sizeof right);
      sum += double{left.x} * right.x + double{left.y} * right.y;
    }
    d[i] = static_cast<float>(sum);
  }
}

// mma.m16n8k8 of tf32, which ignores the lower 13 bits of an fp32 number.
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint64_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto table = exchange(words, 6, __LINE__);
  const auto to_tf32 = [](uint64_t word) {
    const uint32_t bits = static_cast<uint32_t>(word) & 0xffffe000u;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return double{x};
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + 8 * (i / 2), col = 2 * (lane() % 4) + i % 2;
    double sum = d[i];
    for (int k = 0; k < 8; ++k) {
      sum += to_tf32(table[row % 8 * 4 + k % 4][row / 8 + 2 * (k / 4)]) *
             to_tf32(table[col * 4 + k % 4][4 + k / 4]);
    }
    d[i] = static_cast<float>(sum);
  }
}

// mma.m8n8k4 of fp64.
inline void mma_m8n8k4_f64(double (&d)[2], double a, double b) {
  uint64_t words[2];
  std::memcpy(&words[0], &a, sizeof a), std::memcpy(&words[1], &b, sizeof b);
  const auto table = exchange(words, 2, __LINE__);
  for (int i = 0; i < 2; ++i) {
    const int row = lane() / 4, col = 2 * (lane() % 4) + i;
    for (int k = 0; k < 4; ++k) {
      double left, right;
      std::memcpy(&left, &table[row * 4 + k][0], sizeof left);
      std::memcpy(&right, &table[col * 4 + k][1], sizeof right);
      d[i] = std::fma(left, right, d[i]);
    }
  }
}

// ldmatrix.x4: lane l has the address of row l % 8 of matrix l / 8, all 8 x 8. Each lane reads its row before
// the exchange. A row that another lane writes needs a __syncwarp() between the write and the ldmatrix.
inline void ldmatrix(uint32_t (&to)[4], uint32_t address, bool transposed) {
  const auto* const row = reinterpret_cast<const unsigned char*>(uint64_t{address});
  uint64_t row_words[2];
  std::memcpy(row_words, row, sizeof row_words);
  const auto table = exchange(row_words, 2, __LINE__);
  const auto element = [&](int matrix, int row, int col) {
    return static_cast<uint16_t>(table[8 * matrix + row][col / 4] >> 16 * (col % 4));
  };
  uint32_t fragment[4];
  for (int m = 0; m < 4; ++m) {
    const int row = lane() / 4, col = 2 * (lane() % 4);
    const uint32_t low = transposed ? element(m, col, row) : element(m, row, col),
                   high = transposed ? element(m, col + 1, row) : element(m, row, col + 1);
    fragment[m] = low | high << 16;
  }
  std::copy(fragment, fragment + 4, to);
}

// stmatrix.x4: lane l stores row l % 8 of matrix l / 8.
inline void stmatrix(uint32_t address, const uint32_t (&x)[4], bool transposed) {
  if (address % 16 != 0) fail("a row of a matrix is not aligned");
  const uint64_t words[4] = {x[0], x[1], x[2], x[3]};
  const auto table = exchange(words, 4, __LINE__);
  const int matrix = lane() / 8, row = lane() % 8;
  uint16_t elements[8];
  for (int i = 0; i < 8; ++i) {
    const int r = transposed ? i : row, c = transposed ? row : i;
    elements[i] = static_cast<uint16_t>(table[4 * r + c / 2][matrix] >> 16 * (c % 2));
  }
  std::memcpy(reinterpret_cast<void*>(uint64_t{address}), elements, sizeof elements);
}

// movmatrix.trans: transposes an 8 x 8 matrix.
inline uint32_t movmatrix_trans(uint32_t x) {
  const uint64_t word = x;
  const auto table = exchange(&word, 1, __LINE__);
  const auto element = [&](int row, int col) {
    return static_cast<uint32_t>(table[4 * row + col / 2][0] >> 16 * (col % 2)) & 0xffff;
  };
  const int row = lane() / 4, col = 2 * (lane() % 4);
  return element(col, row) | element(col + 1, row) << 16;
}

}  // namespace emulated

#include "builtins.h"
#include "runtime.h"

// Macros of nvcc for sm_90a. They are defined after the CUDA headers, which are compiled for the host.
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL

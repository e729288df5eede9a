// What a kernel's source asks of CUDA, on a CPU: so that kernels run, and their arithmetic is tested, where
// there is no GPU. A block's threads are fibers of one thread. Warps take turns in a random order, and so do
// the lanes of a warp; some of them stand still for a while, so that who does not wait for them runs ahead.
// Copies that are under way arrive no sooner than somebody waits for them; shared memory begins full of NaN.
//
// The compiler includes this file before each source (tests/support/emulated.py) and then compiles the source
// as nvcc does for sm_90a. tile/ptx.h and tile/cuts.h beside this file replace those of kernels; runtime.h
// replaces the CUDA runtime. The emulator knows no speed, no second block at the same time but those of a
// cluster, and of races those that turns of warps and lanes bring out.
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
#define __shared__ static thread_local  // see StaticShared

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
  int bytes, given;  // the rest: zeros
};

// Sums of products, as a fence or a wait found them (products.h).
struct Pin {
  const char* at;
  std::vector<char> bytes;

  const char* end() const { return at + bytes.size(); }
};

struct Block;
struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on
  char* stack;
  Block* block;
  unsigned thread;
  bool begun, done;
  const unsigned* word;  // what it waits for: a change of these bits of it
  unsigned bits, value;
  unsigned exchanges;                          // that it has taken part in with its warp
  std::vector<Copy> open;                      // copies that no group has yet
  std::vector<std::vector<Copy>> groups;       // oldest first
  std::deque<std::function<void()>> products;  // under way (products.h), oldest first
  // Of products (products.h): its registers at the last fence; whether it comes behind the last wait; which
  // sums products since then have; and sums as fences and waits that name them found them.
  std::vector<char> registers;
  bool is_fenced;
  std::set<const void*> started;
  std::vector<Pin> pinned;
};

// What a warp's lanes hand to one another: two tables in turn.
struct Warp {
  unsigned slow;  // lanes that stand still, as bits
  unsigned arrived[2], finished;
  int place[2];  // in the source, of what its lanes are at
  uint64_t table[2][32][8];
};

struct Barrier {
  int arrived;
  unsigned phase;
};

struct Block {
  unsigned number;
  int running;  // warps
  unsigned char* shared = nullptr;
  // Shared memory as products and the copy engine find it: what threads write comes there by a fence of one
  // of them, when its warp's turn is over.
  unsigned char* fenced = nullptr;
  bool has_fenced;
  std::vector<Warp> warps;
  Barrier barriers[16];
  bool all[2];                 // of what threads bring to barrier 0, in its phases in turn
  std::vector<Fiber*> fibers;  // as many as any block had
};

inline int shared_bytes = kSharedBytes;  // what the card says
inline int processors = 4;               // how many multiprocessors it has
inline bool early_products = false;      // some of them (products.h)
inline jmp_buf scheduler;
inline Block cluster[2];
inline int cluster_size, threads, grid, block_bytes;
inline Barrier cluster_barrier;
inline Fiber* current;
inline std::function<void()> kernel;
inline std::mt19937 random_turns(1);

// (swapcontext() asks the system for signals every time.)
inline void yield() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
// Until a word has other bits.
inline void yield_while(const unsigned& word, unsigned bits, unsigned value) {
  current->word = &word, current->bits = bits, current->value = value;
  while ((word & bits) == value) yield();
  current->word = nullptr;
}
inline bool waits(const Fiber& fiber) {
  return fiber.word != nullptr && (*fiber.word & fiber.bits) == fiber.value;
}
// Runs the current fiber until it yields.
[[gnu::noinline]] inline void go_on() {
  if (_setjmp(scheduler) != 0) return;
  if (current->begun) _longjmp(current->place, 1);
  current->begun = true;
  setcontext(&current->context);
}
inline int lane() { return static_cast<int>(current->thread & 31); }

inline Warp& warp_of(const Fiber& fiber) { return fiber.block->warps[fiber.thread / 32]; }

// Every lane leaves n words and gets the table of all. place: a line. Lanes that have parted meet others at
// another line, and are found, if they do not meet within the same helper.
inline uint64_t (*exchange(const uint64_t* words, int n, int place))[8] {
  Warp& warp = warp_of(*current);
  const unsigned number = current->exchanges++, which = number & 1;
  if (warp.arrived[which] == 0) warp.place[which] = place;
  if (warp.place[which] != place) fail("lanes of a warp exchange numbers where others of it do not");
  for (int i = 0; i < n; ++i) warp.table[which][lane()][i] = words[i];
  if (++warp.arrived[which] == 32) warp.arrived[which] = 0, warp.finished = number + 1;
  while (static_cast<int>(warp.finished - (number + 1)) < 0) yield_while(warp.finished, ~0u, warp.finished);
  return warp.table[which];
}

template <class T>
T from_lane(T x, int source, int place) {
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof x);
  const auto table = exchange(&word, 1, place);
  T result;
  std::memcpy(&result, &table[source & 31][0], sizeof result);
  return result;
}

inline void wait_at(Barrier& barrier, int arrivals) {
  const unsigned phase = barrier.phase;
  if (++barrier.arrived == arrivals) {
    barrier.arrived = 0, ++barrier.phase;
  } else {
    yield_while(barrier.phase, ~0u, phase);
  }
}

inline void wait_at(int id, int arrivals) { wait_at(current->block->barriers[id], arrivals); }

inline void start_copy(uint32_t to, const void* from, int bytes, int given) {
  if (given == 0) from = nullptr;
  if (reinterpret_cast<uint64_t>(from) % bytes != 0) fail("a copy's source is not aligned");
  current->open.push_back({reinterpret_cast<void*>(uint64_t{to}), from, bytes, given});
}
inline void close_group() {
  current->groups.push_back(current->open);
  current->open.clear();
}
inline void finish_groups(size_t left) {
  auto& groups = current->groups;
  if (groups.size() > left && random_turns() % 256 == 0) {  // a lane's alone are late
    for (unsigned turns = random_turns() % 256; turns > 0; --turns) yield();
  }
  for (; groups.size() > left; groups.erase(groups.begin())) {
    for (const Copy& copy : groups.front()) {
      std::memset(copy.to, 0, copy.bytes);
      if (copy.from != nullptr) std::memcpy(copy.to, copy.from, copy.given);
    }
  }
}

// A barrier in shared memory: arrivals left and in all, for which parities somebody has waited, and phases
// gone by. As compute-sanitizer's synccheck does, it asks that somebody waits for a phase before the next
// ends.
struct Phases {
  uint16_t left, all : 14, awaited : 2;
  uint32_t phase;
};
inline Phases& phases(uint64_t* barrier) { return *reinterpret_cast<Phases*>(barrier); }
inline void end_phase(Phases& of) {
  const int before = of.phase % 2 == 0 ? 2 : 1;
  if (of.phase > 0 && (of.awaited & before) == 0) fail("nobody waits for a barrier");
  of.awaited &= ~before, of.left = of.all, ++of.phase;
}
// Bytes that bulk copies have still to bring (copy_engine.h), by barrier.
inline std::map<uint64_t*, int> expected;
inline void expect(uint64_t* barrier, int bytes, int arrivals) {
  Phases& of = phases(barrier);
  int& left = expected[barrier];
  left += bytes, of.left -= arrivals;
  if (of.left == 0 && left == 0) end_phase(of);
}
inline void arrive(uint64_t* barrier) {
  if (!expected.empty()) return expect(barrier, 0, 1);
  Phases& of = phases(barrier);
  if (--of.left == 0) end_phase(of);
}
inline void wait_for(uint64_t* barrier, uint32_t parity) {
  phases(barrier).awaited |= 1 << parity;
  yield_while(phases(barrier).phase, 1, parity);
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

// Where products find what is here.
inline unsigned char* fenced(const void* here) {
  for (int i = 0; i < cluster_size; ++i) {
    const auto at = static_cast<const unsigned char*>(here) - cluster[i].shared;
    if (at >= 0 && at < block_bytes) return cluster[i].fenced + at;
  }
  fail("products read, or copies write, beyond shared memory");
}
inline void fence() { current->block->has_fenced = true; }

// Where another block of the cluster has what the block has here.
inline unsigned char* far(const void* here, int rank) {
  if (cluster[rank].running == 0) fail("a block reaches another that has ended");
  return cluster[rank].shared + (static_cast<const unsigned char*>(here) - current->block->shared);
}

// Arrays that a kernel declares as __shared__, each once for all blocks: no cluster has them. They are the
// thread-local variables of this library, which has no others.
class StaticShared {
  unsigned char* begin_ = nullptr;
  size_t bytes_ = 0;

  static int find(dl_phdr_info* info, size_t, void* to) {
    auto& found = *static_cast<StaticShared*>(to);
    const auto own = reinterpret_cast<uint64_t>(&StaticShared::find);
    bool is_own = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& part = info->dlpi_phdr[i];
      const uint64_t begin = info->dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_LOAD) is_own |= own >= begin && own < begin + part.p_memsz;
      if (part.p_type == PT_TLS) bytes = part.p_memsz;
    }
    if (is_own) found.begin_ = static_cast<unsigned char*>(info->dlpi_tls_data), found.bytes_ = bytes;
    return is_own;
  }

 public:
  StaticShared() {
    static thread_local volatile char any;
    any = 0;  // allocates the variables of the thread
    dl_iterate_phdr(find, this);
    if (begin_ == nullptr) fail("no variables of the thread");
  }
  void clear() const { std::memset(begin_, 0xff, bytes_); }  // NaN
  bool is_clear() const { return *begin_ == 0xff && std::memcmp(begin_, begin_ + 1, bytes_ - 1) == 0; }
};

inline void begin(Block& block, unsigned number) {
  if (block.shared == nullptr) {
    // Below 4 GiB, because addresses have 32 bits, and aligned, because descriptors of products have 18 bits.
    const auto pages = reinterpret_cast<uint64_t>(mmap(nullptr, 2 * kSharedRoom, PROT_READ | PROT_WRITE,
                                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0));
    block.shared = reinterpret_cast<unsigned char*>((pages + kSharedRoom - 1) / kSharedRoom * kSharedRoom);
    block.fenced = static_cast<unsigned char*>(std::malloc(kSharedBytes));
  }
  std::memset(block.shared, 0xff, kSharedRoom);  // NaN
  std::memset(block.fenced, 0xff, block_bytes);
  block.has_fenced = false;
  block.number = number, block.running = threads / 32;
  block.warps.assign(threads / 32, Warp{});
  std::fill(std::begin(block.barriers), std::end(block.barriers), Barrier{});
  while (block.fibers.size() < static_cast<size_t>(threads)) {
    block.fibers.push_back(new Fiber{});
    block.fibers.back()->stack = static_cast<char*>(std::malloc(kStackBytes));
  }
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = *block.fibers[i];
    fiber.block = &block, fiber.thread = i, fiber.begun = fiber.done = false, fiber.exchanges = 0;
    fiber.word = nullptr;
    fiber.open.clear(), fiber.groups.clear();
    fiber.pinned.clear(), fiber.is_fenced = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack, 0, kStackBytes};
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

// Blocks number * cluster_size and on.
inline void run_cluster(unsigned number, int bytes) {
  if (bytes > shared_bytes) fail("a block asks for more shared memory than there is");
  cluster_barrier = {}, block_bytes = bytes;
  for (int i = 0; i < cluster_size; ++i) begin(cluster[i], number * cluster_size + i);
  static const StaticShared static_shared;
  static_shared.clear();
  std::vector<Fiber**> running;  // warps, by their first lane
  for (int i = 0; i < cluster_size; ++i) {
    for (int w = 0; w < threads / 32; ++w) running.push_back(&cluster[i].fibers[32 * w]);
  }
  long others = 0;
  size_t idle = 0;  // turns in which nobody has gone on
  for (long turns = 0; !running.empty(); ++turns) {
    // For a while some warps, or lanes, stand still, so that the rest runs ahead of them, until it waits for
    // them.
    if (turns >= others || idle > 8 * running.size()) {
      for (Fiber** warp : running) {
        const unsigned which = random_turns() % 8;
        warp_of(**warp).slow = which == 0 ? ~0u : which <= 2 ? random_turns() : 0;
      }
      others = turns + (64 << random_turns() % 10), idle = 0;
    }
    if (turns > 20'000'000) fail("a block hangs");
    if (!deliveries.empty() && random_turns() % 4 == 0) deliver_any();
    const auto at = running.begin() + random_turns() % running.size();
    Fiber** const warp = *at;
    ++idle;
    const unsigned slow = warp_of(**warp).slow, first = random_turns() % 32;
    if (slow == ~0u) continue;
    bool done = true;
    for (unsigned l = 0; l < 32; ++l) {  // in any order
      current = warp[l ^ first];
      if (!current->done && !waits(*current) && (slow >> (l ^ first) & 1) == 0) idle = 0, go_on();
      done &= current->done;
    }
    Block& block = *warp[0]->block;
    if (block.has_fenced) std::memcpy(block.fenced, block.shared, bytes);
    block.has_fenced = false;
    if (done) --block.running, running.erase(at);
  }
  if (cluster_size > 1 && !static_shared.is_clear()) fail("a cluster with arrays of a block");
  if (!deliveries.empty()) fail("a block has ended before what it was sent");
  for (int i = 0; i < cluster_size; ++i) {
    const unsigned char* const beyond = cluster[i].shared + bytes;
    if (*beyond != 0xff || std::memcmp(beyond, beyond + 1, kSharedRoom - bytes - 1) != 0)
      fail("a block writes beyond its shared memory");
  }
}

// A test's turns are its own, whatever ran before it in the process.
inline void begin_test() {
  static std::string last;
  const char* const test = std::getenv("PYTEST_CURRENT_TEST");
  if (test == nullptr || last == test) return;
  last = test;
  std::seed_seq seed(last.begin(), last.end());
  random_turns.seed(seed);
}

template <class F>
void launch(const F& f, unsigned blocks, int threads_, int bytes, int cluster_size_ = 1) {
  begin_test();
  kernel = f, threads = threads_, cluster_size = cluster_size_, grid = static_cast<int>(blocks);
  if (blocks % cluster_size != 0) fail("a cluster is not complete");
  for (unsigned i = 0; i < blocks / cluster_size; ++i) run_cluster(i, bytes);
}

// Products of 16-bit elements by their place in the lanes' registers (tile/matrix.h), summed in fp64.
template <class T>
float2 unpack(uint32_t pair) {
  T both[2];
  std::memcpy(both, &pair, sizeof pair);
  return {static_cast<float>(both[0]), static_cast<float>(both[1])};
}
template <class T>
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
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

// m16n8k8 of tf32: of a number the lower 13 bits count for nothing.
inline void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint64_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto table = exchange(words, 6, __LINE__);
  const auto number = [](uint64_t word) {
    const uint32_t bits = static_cast<uint32_t>(word) & 0xffffe000u;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return double{x};
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + 8 * (i / 2), col = 2 * (lane() % 4) + i % 2;
    double sum = d[i];
    for (int k = 0; k < 8; ++k) {
      sum += number(table[row % 8 * 4 + k % 4][row / 8 + 2 * (k / 4)]) *
             number(table[col * 4 + k % 4][4 + k / 4]);
    }
    d[i] = static_cast<float>(sum);
  }
}

// m8n8k4 of fp64.
inline void multiply_f64(double (&d)[2], double a, double b) {
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

// ldmatrix: four 8 x 8 matrices whose rows start at the lanes' addresses. Each lane reads its row when it
// comes: what another writes before that is there for sure only behind a __syncwarp().
inline void ldmatrix(uint32_t (&to)[4], uint32_t address, bool transposed) {
  const auto* const at = reinterpret_cast<const unsigned char*>(uint64_t{address});
  uint64_t row_of_lane[2];
  std::memcpy(row_of_lane, at, sizeof row_of_lane);
  const auto table = exchange(row_of_lane, 2, __LINE__);
  const auto element = [&](int matrix, int row, int col) {
    return static_cast<uint16_t>(table[8 * matrix + row][col / 4] >> 16 * (col % 4));
  };
  uint32_t got[4];
  for (int m = 0; m < 4; ++m) {
    const int row = lane() / 4, col = 2 * (lane() % 4);
    const uint32_t low = transposed ? element(m, col, row) : element(m, row, col),
                   high = transposed ? element(m, col + 1, row) : element(m, row, col + 1);
    got[m] = low | high << 16;
  }
  std::copy(got, got + 4, to);
}

// stmatrix: the lanes hand their elements on, and each stores its row.
inline void stmatrix(uint32_t address, const uint32_t (&x)[4], bool transposed) {
  if (address % 16 != 0) fail("a row of a matrix is not aligned");
  const uint64_t words[4] = {x[0], x[1], x[2], x[3]};
  const auto table = exchange(words, 4, __LINE__);
  const int matrix = lane() / 8, line = lane() % 8;
  uint16_t row[8];
  for (int i = 0; i < 8; ++i) {
    const int r = transposed ? i : line, c = transposed ? line : i;
    row[i] = static_cast<uint16_t>(table[4 * r + c / 2][matrix] >> 16 * (c % 2));
  }
  std::memcpy(reinterpret_cast<void*>(uint64_t{address}), row, sizeof row);
}

inline uint32_t transpose_pairs(uint32_t x) {
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

// The macros of nvcc for sm_90a. The CUDA headers above are compiled for the host.
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL

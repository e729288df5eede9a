// Built-in variables and functions of CUDA: indices, barriers, warp shuffles and votes, and arithmetic.
#pragma once

#include "emulator.h"

namespace emulated {

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

// Shared memory is below 4 GiB, so an address has 32 bits.
inline void* __cvta_shared_to_generic(size_t address) { return reinterpret_cast<void*>(address); }
inline size_t __cvta_generic_to_shared(const void* pointer) { return reinterpret_cast<size_t>(pointer); }

inline void __syncthreads() { emulated::arrive_and_wait(0, emulated::threads); }
inline bool __syncthreads_and(bool x) {
  emulated::Block& block = *emulated::current->block;
  bool& all = block.all[block.barriers[0].phase & 1];
  if (block.barriers[0].arrived == 0) all = true;
  all &= x;
  __syncthreads();
  return all;
}
inline void __syncwarp(unsigned = ~0u, int line = __builtin_LINE()) {
  uint64_t word = 0;
  emulated::exchange(&word, 1, line);
}
namespace emulated {
struct ShuffleWidth {
  constexpr ShuffleWidth(int width) {
    if (width != 32) fail("a shuffle has a width other than 32");
  }
};
}  // namespace emulated
template <class T>
T __shfl_sync(unsigned, T x, int source, emulated::ShuffleWidth = 32, int line = __builtin_LINE()) {
  return emulated::shuffle(x, source, line);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask, emulated::ShuffleWidth = 32, int line = __builtin_LINE()) {
  return emulated::shuffle(x, emulated::lane() ^ mask, line);
}
inline bool __any_sync(unsigned, bool x, int line = __builtin_LINE()) {
  const uint64_t word = x;
  const auto table = emulated::exchange(&word, 1, line);
  return std::any_of(table, table + 32, [](const auto& words) { return words[0] != 0; });
}
inline bool __all_sync(unsigned, bool x, int line = __builtin_LINE()) { return !__any_sync(~0u, !x, line); }
template <class T>
T __shfl_up_sync(unsigned, T x, int delta, emulated::ShuffleWidth = 32, int line = __builtin_LINE()) {
  const int lane = emulated::lane();
  return emulated::shuffle(x, lane < delta ? lane : lane - delta, line);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int delta, emulated::ShuffleWidth = 32, int line = __builtin_LINE()) {
  const int lane = emulated::lane();
  return emulated::shuffle(x, lane + delta < 32 ? lane + delta : lane, line);
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
// `volatile`, so that the compiler does not fuse the sum or the product with another operation.
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __log2f(float x) { return std::log2(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline double rsqrt(double x) { return 1. / std::sqrt(x); }
using std::max;
using std::min;

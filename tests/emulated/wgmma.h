// wgmma.mma_async: d = a b or d += a b for a warpgroup. A product reads its operands and writes its
// accumulators when the kernel waits for its group, which is the latest time that the kernel allows. The
// result is wrong if the kernel releases a tile, overwrites registers of A or reads accumulators before the
// wait. With has_early_products random groups complete when they are committed. The result is then wrong if a
// fence of the async proxy is missing.
//
// A missing wgmma.fence does not change results on a CPU, so check_accumulators() and is_fenced() detect it.
#pragma once

#include "emulator.h"

namespace emulated {

inline size_t bytes_to_stack_end(const void* address) {
  return current->stack + kStackBytes - static_cast<const char*>(address);
}
// Records the address and value of accumulators. On a GPU this forces the compiler to have them in their
// registers.
inline void pin_registers(const void* accumulators, size_t bytes) {
  const char* const begin = static_cast<const char*>(accumulators);
  auto& pinned = current->pinned_accumulators;
  std::erase_if(pinned, [&](const PinnedAccumulators& other) {
    return other.begin < begin + bytes && begin < other.end();
  });
  pinned.push_back({begin, std::vector<char>(begin, begin + bytes)});
}
// wgmma.fence: saves the stack of the fiber, where its registers are.
[[gnu::noinline]] inline void fence_registers() {
  __syncwarp();  // wgmma.fence synchronizes the warp
  const char* const begin = static_cast<const char*>(__builtin_frame_address(0));
  current->fenced_registers.assign(begin, begin + bytes_to_stack_end(begin));
  current->has_fence = true, current->started_accumulators.clear();
}
// Whether registers have the same value as at the last fence.
inline bool is_fenced(const void* registers, size_t bytes) {
  const auto& fenced = current->fenced_registers;
  const size_t offset = bytes_to_stack_end(registers);
  return offset <= fenced.size() &&
         std::memcmp(registers, fenced.data() + fenced.size() - offset, bytes) == 0;
}
// Checks the accumulators of a product when it starts:
// - A fence comes between the last wait and the product.
// - The first product since the fence that adds to accumulators finds them pinned and unchanged since the
//   fence. Later products to the same accumulators need no fence.
inline void check_accumulators(const void* accumulators, size_t bytes, bool add) {
  if (!current->has_fence) fail("no wgmma.fence between the last wait and a product");
  const bool is_first = current->started_accumulators.insert(accumulators).second;
  if (!is_first || !add) return;
  const char* const begin = static_cast<const char*>(accumulators);
  const auto& pinned = current->pinned_accumulators;
  const bool is_pinned = std::any_of(pinned.begin(), pinned.end(), [&](const PinnedAccumulators& other) {
    return other.begin <= begin && begin + bytes <= other.end() &&
           std::memcmp(begin, &other.bytes[begin - other.begin], bytes) == 0;
  });
  if (!is_pinned) fail("the accumulators of a product are not pinned");
  if (!is_fenced(accumulators, bytes)) fail("the accumulators of a product were written after the fence");
}

// The value of a 16-bit element.
template <class T>
float to_float(uint16_t bits);
template <>
inline float to_float<__nv_bfloat16>(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}
template <>
inline float to_float<__half>(uint16_t bits) {
  static const std::vector<float> values = [] {
    std::vector<float> table(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) {
      const auto raw = static_cast<uint16_t>(i);
      __half half;
      std::memcpy(&half, &raw, sizeof half);
      table[i] = __half2float(half);
    }
    return table;
  }();
  return values[bits];
}

// An operand in shared memory. is_mn_major: the M dimension of A, or the N dimension of B, is contiguous;
// else the K dimension is contiguous.
struct Matrix {
  uint64_t descriptor;
  bool is_mn_major;

  // The element at row r of A, or column r of B, and index c of the K dimension.
  uint16_t at(unsigned r, unsigned c) const {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4;
    unsigned offset;
    if (descriptor >> 62 == 1) {  // swizzle of 128 bytes
      offset = is_mn_major ? start + r / 64 * leading + c / 8 * stride + c % 8 * 128 + r % 64 * 2
                           : start + r / 8 * stride + r % 8 * 128 + c * 2;
      offset ^= offset >> 3 & 0x70;
    } else {  // no swizzle: core matrices of 8 x 8 elements
      const unsigned row = is_mn_major ? c : r, col = is_mn_major ? r : c;
      offset = start + r / 8 * stride + c / 8 * leading + row % 8 * 16 + col % 8 * 2;
    }
    if (offset + 2 > static_cast<unsigned>(block_bytes)) fail("wgmma reads beyond shared memory");
    uint16_t element;
    std::memcpy(&element, current->block->async_shared + offset, sizeof element);
    return element;
  }
};

// Reads rows lane / 4 and lane / 4 + 8 of the warp's 16 x 16 tile of A, from registers or shared memory.
template <class T>
void read_left(float (&to)[2][16], const uint32_t* a) {
  const uint64_t words[4] = {a[0], a[1], a[2], a[3]};
  const auto table = exchange(words, 4, __LINE__);
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 16; ++k) {
      const auto pair = static_cast<uint32_t>(table[lane() / 4 * 4 + k % 8 / 2][i + 2 * (k / 8)]);
      to[i][k] = to_float<T>(static_cast<uint16_t>(pair >> 16 * (k % 2)));
    }
  }
}
template <class T>
void read_left(float (&to)[2][16], const Matrix& a) {
  const int row = current->thread / 32 % 4 * 16 + lane() / 4;
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 16; ++k) to[i][k] = to_float<T>(a.at(row + 8 * i, k));
  }
}
// d = Sign a b + (Add ? d : 0), accumulated in fp64.
template <class T, int N, bool Add, int Sign, class A>
[[gnu::optimize("O2")]] void multiply_group(float (*d)[4], const A& a, const Matrix& b) {
  float left[2][16];
  read_left<T>(left, a);
  for (int n = 0; n < N / 8; ++n) {
    for (int j = 0; j < 2; ++j) {
      float right[16];
      for (int k = 0; k < 16; ++k) right[k] = Sign * to_float<T>(b.at(8 * n + 2 * (lane() % 4) + j, k));
      for (int i = 0; i < 2; ++i) {
        double sum = Add ? d[n][2 * i + j] : 0.f;
        for (int k = 0; k < 16; k += 2)
          sum += double{left[i][k]} * right[k] + double{left[i][k + 1]} * right[k + 1];
        d[n][2 * i + j] = static_cast<float>(sum);
      }
    }
  }
}

// Starts a product with A in registers.
template <class T, int N, bool Add, int Sign>
void start_product(float (*d)[4], const uint32_t (&a)[4], const Matrix& b) {
  check_accumulators(d, N / 8 * sizeof *d, Add);
  if (!is_fenced(a, sizeof a)) fail("the A operand of a product was written after the fence");
  const uint32_t* const left = a;
  current->products.push_back([=] { multiply_group<T, N, Add, Sign>(d, left, b); });
}
// Starts a product with A in shared memory, given by its descriptor.
template <class T, int N, bool Add, int Sign>
void start_product(float (*d)[4], uint64_t a, const Matrix& b) {
  check_accumulators(d, N / 8 * sizeof *d, Add);
  current->products.push_back([=] { multiply_group<T, N, Add, Sign>(d, Matrix{a, false}, b); });
}

// Performs the products of the oldest groups until `pending` groups remain.
inline void finish_products(int pending) {
  auto& products = current->products;
  auto groups = std::count(products.begin(), products.end(), nullptr);
  for (; groups > pending; products.pop_front()) {
    if (products.front() == nullptr) {
      --groups;
    } else {
      products.front()();
    }
  }
}
inline void wgmma_commit() {
  __syncwarp();  // wgmma.commit_group synchronizes the warp, so all lanes have waited for the barriers of
                 // their operands
  current->products.push_back(nullptr);  // ends the group
  // A hash of values that all lanes of the warp share selects one group in four.
  const unsigned hash = (current->exchanges + 31 * (current->thread / 32)) * 2654435761u;
  if (has_early_products && hash >> 30 == 0) {
    yield();  // a fence of the async proxy takes effect at the end of the turn
    finish_products(0);
  }
}
inline void wgmma_wait(int pending) {
  const auto& products = current->products;
  const auto groups = std::count(products.begin(), products.end(), nullptr);
  for (int turns = 0; groups > pending && turns < 4; ++turns) yield();
  finish_products(pending);
  current->has_fence = false;
}

}  // namespace emulated

// Products of warpgroups (wgmma), as late as a kernel lets them be: they read their factors, and write their
// sums, when somebody waits for them. A tile that is given back before, a left factor whose registers have
// something else by then, sums that are read before: all of these come out wrong. With early_products some
// are as early as they can be, and find what no fence has brought them. Registers that no fence has brought
// them would go unseen here, where a compiler moves nothing across: so fences are checked.
#pragma once

#include "emulator.h"

namespace emulated {

inline size_t to_stack_end(const void* from) {
  return current->stack + kStackBytes - static_cast<const char*>(from);
}
// The compiler has these sums, as they are, in their registers.
inline void pin_registers(const void* sums, size_t bytes) {
  const char* const at = static_cast<const char*>(sums);
  std::erase_if(current->pinned, [&](const Pin& pin) { return pin.at < at + bytes && at < pin.end(); });
  current->pinned.push_back({at, std::vector<char>(at, at + bytes)});
}
// What the thread has in its registers products started later find, as it is here.
[[gnu::noinline]] inline void fence_registers() {
  __syncwarp();  // wgmma.fence synchronises the warp
  const char* const from = static_cast<const char*>(__builtin_frame_address(0));
  current->registers.assign(from, from + to_stack_end(from));
  current->is_fenced = true, current->started.clear();
}
inline bool is_fenced(const void* registers, size_t bytes) {
  const size_t left = to_stack_end(registers), kept = current->registers.size();
  return left <= kept && std::memcmp(registers, current->registers.data() + kept - left, bytes) == 0;
}
// Products need a fence behind every wait, and behind all that has been written to their left factor. What
// sums hold that they are added to has a fence behind it too, unless products are adding to it, and a fence
// or a wait names them as they are.
inline void check_sums(const void* sums, size_t bytes, bool add) {
  if (!current->is_fenced) fail("products without a fence before them");
  const bool is_first = current->started.insert(sums).second;
  if (!is_first || !add) return;
  const char* const at = static_cast<const char*>(sums);
  const bool is_pinned = std::any_of(current->pinned.begin(), current->pinned.end(), [&](const Pin& pin) {
    return pin.at <= at && at + bytes <= pin.end() && std::memcmp(at, &pin.bytes[at - pin.at], bytes) == 0;
  });
  if (!is_pinned) fail("products are added to sums that no fence names");
  if (!is_fenced(sums, bytes)) fail("products are added to sums that were written behind the fence");
}

// The numbers of 16-bit elements.
template <class T>
float number_of(uint16_t bits);
template <>
inline float number_of<__nv_bfloat16>(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}
template <>
inline float number_of<__half>(uint16_t bits) {
  static const std::vector<float> numbers = [] {
    std::vector<float> all(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) {
      const auto raw = static_cast<uint16_t>(i);
      __half half;
      std::memcpy(&half, &raw, sizeof half);
      all[i] = __half2float(half);
    }
    return all;
  }();
  return numbers[bits];
}

// A factor in shared memory. `bits`: the descriptor. is_mn_major: neighbouring rows of a left factor, or
// columns of a right one, are neighbours in memory; else neighbours of the inner dimension are.
struct Matrix {
  uint64_t bits;
  bool is_mn_major;

  // The element at row (or column) r and c of the inner dimension.
  uint16_t at(unsigned r, unsigned c) const {
    const unsigned start = (bits & 0x3fff) << 4, leading = (bits >> 16 & 0x3fff) << 4,
                   stride = (bits >> 32 & 0x3fff) << 4;
    unsigned offset;
    if (bits >> 62 == 1) {  // lines of 128 bytes, swizzled
      offset = is_mn_major ? start + r / 64 * leading + c / 8 * stride + c % 8 * 128 + r % 64 * 2
                           : start + r / 8 * stride + r % 8 * 128 + c * 2;
      offset ^= offset >> 3 & 0x70;
    } else {  // matrices of 8 x 8 elements
      const unsigned line = is_mn_major ? c : r, within = is_mn_major ? r : c;
      offset = start + r / 8 * stride + c / 8 * leading + line % 8 * 16 + within % 8 * 2;
    }
    if (offset + 2 > static_cast<unsigned>(block_bytes)) fail("products read beyond shared memory");
    uint16_t element;
    std::memcpy(&element, current->block->fenced + offset, sizeof element);
    return element;
  }
};

// Rows row and row + 8 of 16 columns of a left factor: in the lanes' registers, or in shared memory.
template <class T>
void read_left(float (&to)[2][16], const uint32_t* a) {
  const uint64_t words[4] = {a[0], a[1], a[2], a[3]};
  const auto table = exchange(words, 4, __LINE__);
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 16; ++k) {
      const auto pair = static_cast<uint32_t>(table[lane() / 4 * 4 + k % 8 / 2][i + 2 * (k / 8)]);
      to[i][k] = number_of<T>(static_cast<uint16_t>(pair >> 16 * (k % 2)));
    }
  }
}
template <class T>
void read_left(float (&to)[2][16], const Matrix& a) {
  const int row = current->thread / 32 % 4 * 16 + lane() / 4;
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 16; ++k) to[i][k] = number_of<T>(a.at(row + 8 * i, k));
  }
}
// d += a b, or without Add d = a b; Sign -1: -a for a. Summed in fp64.
template <class T, int N, bool Add, int Sign, class A>
[[gnu::optimize("O2")]] void multiply_group(float (*d)[4], const A& a, const Matrix& b) {
  float left[2][16];
  read_left<T>(left, a);
  for (int n = 0; n < N / 8; ++n) {
    for (int j = 0; j < 2; ++j) {
      float right[16];
      for (int k = 0; k < 16; ++k) right[k] = Sign * number_of<T>(b.at(8 * n + 2 * (lane() % 4) + j, k));
      for (int i = 0; i < 2; ++i) {
        double sum = Add ? d[n][2 * i + j] : 0.f;
        for (int k = 0; k < 16; k += 2)
          sum += double{left[i][k]} * right[k] + double{left[i][k + 1]} * right[k + 1];
        d[n][2 * i + j] = static_cast<float>(sum);
      }
    }
  }
}

// Starts a product with a left factor in registers, or in shared memory by its descriptor.
template <class T, int N, bool Add, int Sign>
void start_product(float (*d)[4], const uint32_t (&a)[4], const Matrix& b) {
  check_sums(d, N / 8 * sizeof *d, Add);
  if (!is_fenced(a, sizeof a)) fail("products' left factor was written behind the fence");
  const uint32_t* const left = a;
  current->products.push_back([=] { multiply_group<T, N, Add, Sign>(d, left, b); });
}
template <class T, int N, bool Add, int Sign>
void start_product(float (*d)[4], uint64_t a, const Matrix& b) {
  check_sums(d, N / 8 * sizeof *d, Add);
  current->products.push_back([=] { multiply_group<T, N, Add, Sign>(d, Matrix{a, false}, b); });
}

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
inline void commit_products() {
  __syncwarp();  // synchronises the warp, as the instruction does: all lanes have seen the phase of their
                 // barrier
  current->products.push_back(nullptr);  // the end of a group
  // All of a warp alike.
  const unsigned turn = (current->exchanges + 31 * (current->thread / 32)) * 2654435761u;
  if (early_products && turn >> 30 == 0) {
    yield();  // what the warp has fenced is there after its turn
    finish_products(0);
  }
}
inline void wait_products(int pending) {
  const auto& products = current->products;
  const auto groups = std::count(products.begin(), products.end(), nullptr);
  for (int turns = 0; groups > pending && turns < 4; ++turns) yield();
  finish_products(pending);
  current->is_fenced = false;
}

}  // namespace emulated

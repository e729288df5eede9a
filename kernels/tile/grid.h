// Grid sizes, for kernels that loop over their jobs with the stride of the grid, and division by a constant
// of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace girih::kernels {

__host__ __device__ constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// The number of blocks, at most the limit of gridDim.x, 2^31 - 1. The kernel loops over the remaining jobs.
inline unsigned blocks_for(int64_t blocks) {
  return static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff));
}

// x / by for x < 2^31 and a divisor that the host knows, as one product and one shift; an integer division is
// a chain of about twenty instructions. Let 2^l >= by and factor = ceil(2^(31+l) / by). Rounding up adds less
// than x / 2^(31+l) < 2^-l <= 1 / by to the quotient, too little to reach the next integer.
struct Divider {
  uint32_t by, factor;
  int shift;

  constexpr explicit Divider(int64_t by) : by(static_cast<uint32_t>(by)), factor(0), shift(31) {
    while ((int64_t{1} << (shift - 31)) < by) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + by - 1) / by);
  }
  __host__ __device__ constexpr uint32_t divide(uint32_t x) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(x) * factor >> shift);
  }
};

namespace divider {
// Whether the quotients just below and at multiples of `by`, from the first to the last, are right.
constexpr bool divides(uint32_t by) {
  const Divider by_it(by);
  constexpr uint32_t kMost = 0x7fffffff;
  const uint32_t step = kMost / by / 97 + 1;
  for (uint32_t n = 0; n <= kMost / by; n += step) {
    if (by_it.divide(n * by) != n || (n > 0 && by_it.divide(n * by - 1) != n - 1)) return false;
  }
  return by_it.divide(kMost) == kMost / by;
}
static_assert(divides(1) && divides(2) && divides(3) && divides(7) && divides(12) && divides(641));
static_assert(divides(65536) && divides(65537) && divides(0x40000001) && divides(0x7fffffff));
}  // namespace divider

}  // namespace girih::kernels

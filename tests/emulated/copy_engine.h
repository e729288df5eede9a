// The copy engine (tile/tma.h): boxes of tensors come in any order, and a barrier's phase waits for their
// bytes.
#pragma once

#include <map>

#include "emulator.h"

namespace emulated {

struct TensorMap {
  const void* data;
  int64_t stride[4], size[4];
  int rows;
};
inline std::map<uint64_t*, int> expected;

inline void expect(uint64_t* barrier, int bytes, int arrivals) {
  Phases& of = phases(barrier);
  expected[barrier] += bytes, of.left -= arrivals;
  if (of.left == 0 && expected[barrier] == 0) end_phase(of);
}
inline void arrive_expect_tx(uint64_t* barrier, int bytes) { expect(barrier, bytes, 1); }
inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  if (reinterpret_cast<uint64_t>(from) % 16 != 0 || bytes % 16 != 0) fail("bytes are not aligned");
  deliveries.push_back([=] {
    std::memcpy(to, from, bytes), std::memcpy(fenced(to), from, bytes);
    expect(barrier, -bytes, 0);
  });
}
inline void tma_load(uint32_t to, const void* boxes, int64_t col, int64_t row, int64_t head, int64_t batch,
                     uint64_t* barrier) {
  TensorMap of;
  std::memcpy(&of, boxes, sizeof of);
  if (to % 1024 != 0) fail("a box is not aligned");
  deliveries.push_back([=] {
    for (int r = 0; r < of.rows; ++r) {
      for (int c = 0; c < 64; ++c) {
        const bool is =
            row + r < of.size[1] && col + c < of.size[3] && head < of.size[2] && batch < of.size[0];
        const int64_t at =
            batch * of.stride[0] + (row + r) * of.stride[1] + head * of.stride[2] + (col + c) * of.stride[3];
        auto* place = reinterpret_cast<uint16_t*>(uint64_t{to}) + r * 64 + (c / 8 ^ r % 8) * 8 + c % 8;
        *place = is ? static_cast<const uint16_t*>(of.data)[at] : 0;
      }
    }
    auto* const from = reinterpret_cast<const void*>(uint64_t{to});
    std::memcpy(fenced(from), from, of.rows * 128);
    expect(barrier, -of.rows * 128, 0);
  });
}

}  // namespace emulated

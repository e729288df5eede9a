// Bulk copies (TMA): bytes and boxes of tensors come in any order, and a barrier's phase waits for them.
#pragma once

#include "emulator.h"
#include "runtime.h"

namespace emulated {

inline void check_bulk(const void* at, int bytes) {
  if (reinterpret_cast<uint64_t>(at) % 16 != 0 || bytes % 16 != 0) fail("bytes are not aligned");
}
// Writes bytes to shared memory, for threads and for products.
inline void deliver_bytes(void* to, const void* from, int bytes) {
  std::memcpy(to, from, bytes), std::memcpy(fenced(to), from, bytes);
}

// From global to shared memory.
inline void load_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_bulk(to, bytes), check_bulk(from, bytes);
  deliveries.push_back([=] {
    deliver_bytes(to, from, bytes);
    expect(barrier, -bytes, 0);
  });
}
// From the shared memory of a block to that of another.
inline void send_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_bulk(to, bytes), check_bulk(from, bytes);
  deliveries.push_back([=] {
    deliver_bytes(to, fenced(from), bytes);
    expect(barrier, -bytes, 0);
  });
}
// From shared to global memory, after a fence. The fence takes effect at the end of the warp's turn.
inline void store_bytes(void* to, const void* from, int bytes) {
  check_bulk(to, bytes), check_bulk(from, bytes);
  fence();
  yield();
  std::memcpy(to, fenced(from), bytes);
}

struct BoxStart {
  int64_t batch, head, row, col;
};
inline void load_box(uint32_t to, const void* tensor_map, BoxStart start, uint64_t* barrier) {
  TensorMap of;
  std::memcpy(&of, tensor_map, sizeof of);
  if (to % 1024 != 0) fail("a box is not aligned");
  deliveries.push_back([=] {
    auto* const box = reinterpret_cast<uint16_t*>(uint64_t{to});
    for (int r = 0; r < of.rows; ++r) {
      for (int c = 0; c < 64; ++c) {
        const int64_t at[4] = {start.col + c, start.row + r, start.head, start.batch};
        bool exists = true;
        int64_t offset = 0;
        for (int d = 0; d < 4; ++d) exists &= at[d] < of.size[d], offset += at[d] * of.stride[d];
        uint16_t& element = box[r * 64 + (c / 8 ^ r % 8) * 8 + c % 8];
        element = 0;
        if (exists) std::memcpy(&element, of.data + offset, sizeof element);
      }
    }
    std::memcpy(fenced(box), box, of.rows * 128);
    expect(barrier, -of.rows * 128, 0);
  });
}

}  // namespace emulated

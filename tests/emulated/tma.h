// Bulk copies (TMA) of bytes and of boxes of tensors. They complete in random order. A completed copy
// subtracts its bytes from the tx-count of an mbarrier.
#pragma once

#include "emulator.h"
#include "runtime.h"

namespace emulated {

inline void check_alignment(const void* address, int bytes) {
  if (reinterpret_cast<uint64_t>(address) % 16 != 0 || bytes % 16 != 0) fail("a bulk copy is not aligned");
}
// Writes bytes to shared memory as threads and as the async proxy see it.
inline void write_shared(void* to, const void* from, int bytes) {
  std::memcpy(to, from, bytes), std::memcpy(async_address(to), from, bytes);
}

// Copies from global to shared memory.
inline void load_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_alignment(to, bytes), check_alignment(from, bytes);
  bulk_copies.push_back([=] {
    write_shared(to, from, bytes);
    update_barrier(barrier, -bytes, 0);
  });
}
// Copies from the shared memory of a block to the shared memory of another block of the cluster.
inline void send_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_alignment(to, bytes), check_alignment(from, bytes);
  bulk_copies.push_back([=] {
    write_shared(to, async_address(from), bytes);
    update_barrier(barrier, -bytes, 0);
  });
}
// Copies from shared to global memory after a fence of the async proxy. The fence takes effect at the end of
// the warp's turn, so the fiber yields.
inline void store_bytes(void* to, const void* from, int bytes) {
  check_alignment(to, bytes), check_alignment(from, bytes);
  fence_async_proxy();
  yield();
  std::memcpy(to, async_address(from), bytes);
}

struct BoxStart {
  int64_t batch, head, row, col;
};
// Copies a box of 64 columns with a swizzle of 128 bytes. Elements outside of the tensor are zero.
inline void load_box(uint32_t to, const void* tensor_map, BoxStart start, uint64_t* barrier) {
  TensorMap map;
  std::memcpy(&map, tensor_map, sizeof map);
  if (to % 1024 != 0) fail("a box is not aligned");
  bulk_copies.push_back([=] {
    auto* const box = reinterpret_cast<uint16_t*>(uint64_t{to});
    for (int r = 0; r < map.rows; ++r) {
      for (int c = 0; c < 64; ++c) {
        const int64_t index[4] = {start.col + c, start.row + r, start.head, start.batch};
        bool is_inside = true;
        int64_t offset = 0;
        for (int d = 0; d < 4; ++d) is_inside &= index[d] < map.size[d], offset += index[d] * map.stride[d];
        uint16_t& element = box[r * 64 + (c / 8 ^ r % 8) * 8 + c % 8];
        element = 0;
        if (is_inside) std::memcpy(&element, map.data + offset, sizeof element);
      }
    }
    std::memcpy(async_address(box), box, map.rows * 128);
    update_barrier(barrier, -map.rows * 128, 0);
  });
}

}  // namespace emulated

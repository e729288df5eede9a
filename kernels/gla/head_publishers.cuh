// The store warps of head_read_kernel: store S to global memory, once for each pair of chunks.
#pragma once

#include "gla/head_block.cuh"
#include "tile/row_store.h"

namespace girih::kernels {

template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::publish() const {
  constexpr int kPublished = 32 * kPublishers * 8 / D;  // rows of one iteration
  const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / (D / 8), key = thread % (D / 8) * 8;
  // Chunk indices count from the start of the sequence: a segment may start inside of a pair.
  const int64_t first_chunk = (walk.start - walk.sequence.start) / kChunk,
                last_chunk = (walk.sequence.end - walk.sequence.start - 1) / kChunk,
                first_pair = first_piece(shape.tokens, walk.sequence, kHeadPair);
  Turn from;
#pragma unroll 1
  for (int turn = 0; turn < walk.chunks; ++turn, from.next(pass.slots)) {
    const int64_t chunk = first_chunk + walk.token_of(turn) / kChunk;
    // S is stored before the first chunk of a pair, in reverse before the last. The warps wait for the other
    // states too, as a wait must not miss a phase of the barrier.
    const bool published = Reverse ? chunk % 2 == 1 || chunk == last_chunk : chunk % 2 == 0;
    wait(&ring.carried[from.place], from.parity);
    if (published) {
      T* to = static_cast<T*>(p.states) +
              ((first_pair + chunk / 2) * state_heads(p) + state_head) * shape.V * shape.D +
              (col + row) * static_cast<int64_t>(shape.D) + key;
      const State carried = state_at(from.place);
#pragma unroll 2
      for (int i = 0; i < kSlab; i += kPublished) {
        const uint4 x = *reinterpret_cast<const uint4*>(&carried.at(row + i, key));
        const uint32_t pack[4] = {x.x, x.y, x.z, x.w};
        if (row + i < cols && key < shape.D) store_pack(to, pack);
        to += kPublished * shape.D;
      }
    }
    arrive(&ring.used[from.place]);
  }
}

}  // namespace girih::kernels

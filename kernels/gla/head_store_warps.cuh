// The store warps of head_read_kernel: store S to global memory, once for each pair of chunks.
#pragma once

#include "gla/head_block.cuh"
#include "tile/row_store.h"

namespace girih::kernels {

template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::run_store_warps() const {
  constexpr int kRowsPerStore = 32 * kStoreWarps * 8 / D;  // rows of one iteration
  const int thread = static_cast<int>(threadIdx.x) % 128, row = thread / (D / 8), key = thread % (D / 8) * 8;
  // Chunk indices count from the start of the sequence: a segment may start inside of a pair.
  const int64_t first_chunk = (range.start - range.sequence.start) / kChunk,
                last_chunk = (range.sequence.end - range.sequence.start - 1) / kChunk,
                first_pair = first_token_range(shape.tokens, range.sequence, kHeadPair);
  PipelineState state_pipe;
#pragma unroll 1
  for (int step = 0; step < range.chunks; ++step, state_pipe.next(params.state_stages)) {
    const int64_t chunk = first_chunk + range.first_token(step) / kChunk;
    // S is stored before the first chunk of a pair, in reverse before the last. The warps wait for the other
    // states too, as a wait must not miss a phase of the barrier.
    const bool is_stored = Reverse ? chunk % 2 == 1 || chunk == last_chunk : chunk % 2 == 0;
    ring.state_full.wait(state_pipe);
    if (is_stored) {
      T* to = static_cast<T*>(p.states) +
              ((first_pair + chunk / 2) * count_state_heads(p) + state_head) * shape.V * shape.D +
              (col + row) * static_cast<int64_t>(shape.D) + key;
      const State state_tile = state_at(state_pipe.stage);
#pragma unroll 2
      for (int i = 0; i < kSlab; i += kRowsPerStore) {
        const uint4 x = *reinterpret_cast<const uint4*>(&state_tile.at(row + i, key));
        const uint32_t pack[4] = {x.x, x.y, x.z, x.w};
        if (row + i < cols && key < shape.D) store_pack(to, pack);
        to += kRowsPerStore * shape.D;
      }
    }
    ring.state_empty.arrive(state_pipe.stage);
  }
}

}  // namespace girih::kernels

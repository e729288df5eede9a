// A block of the gradients with a beta for every channel: its size, what it has in shared memory, and what it
// knows of its chunk.
#pragma once

#include "delta_product/part.cuh"
#include "delta_product/prepared.cuh"
#include "delta_product/vector.h"
#include "tile/launch.h"
#include "tile/row_store.h"

namespace girih::kernels::delta_product {

template <int D>
struct VectorSizes {
  static constexpr int kThreads = 256;
  static constexpr int kHalf = kThreads / 2;  // the threads that have the same columns
  static constexpr int kCols = D / 2;         // of a warp: 16 rows, half of the columns
  // Of a multiprocessor, as many as its shared memory lets: 228 KB, before sm_90 164 KB.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocks = D == 64 ? 2 : 1;
#else
  static constexpr int kBlocks = D == 64 ? 4 : 2;
#endif
};

// What a block knows of its chunk. It lies in shared memory: registers are for sums.
struct VectorHere {
  int64_t batch, token, step;      // where the chunk begins
  int tokens, steps;               // of the chunk
  int head, key_head, query_head;  // the memory's, that of k, the first of q
};

// A block's shared memory.
template <typename T, int D>
struct VectorTiles {
  using Rows = PaddedTile<T, kDeltaRows, D>;
  using State = PaddedTile<T, D, D>;
  using Weights = PaddedTile<T, kDeltaRows, kDeltaRows>;
  static constexpr int kBytes =
      State::kBytes + 4 * Rows::kBytes + Weights::kBytes + static_cast<int>(sizeof(VectorHere));
  static_assert(VectorSizes<D>::kBlocks * (kBytes + 1024) <= 228 * 1024, "a block gives 1 KB away");
  static_assert(kDeltaFlag + 16 <= Weights::kBytes, "X is through before there are weights");

  State state;  // S, then dS, transposed
  Rows k, u, left, right;
  Weights weights;
  Prepared prepared;  // X and the flag, in the weights' place
  VectorHere* here;

  __device__ explicit VectorTiles(unsigned char* room) {
    const auto take = [&](int bytes) {
      unsigned char* const here = room;
      room += bytes;
      return reinterpret_cast<T*>(here);
    };
    state.data = take(State::kBytes);
    k.data = take(Rows::kBytes), u.data = take(Rows::kBytes);
    left.data = take(Rows::kBytes), right.data = take(Rows::kBytes);
    prepared.data = room;
    weights.data = take(Weights::kBytes);
    here = reinterpret_cast<VectorHere*>(room);
  }
};

// What a block finds its chunk by.
struct VectorGrid {
  Divider heads, each;  // memory heads; a sequence's chunks, where sequences are not packed
  Divider key_share, query_share;
  int tokens, members;  // of a chunk; query heads of a memory head

  explicit VectorGrid(const DeltaShape& shape)
      : heads(std::max(shape.heads, 1)),
        each(chunks_of_each(shape)),
        key_share(shape.key_share),
        query_share(shape.query_share),
        tokens(delta_chunk(shape.n)),
        members(shape.query_heads / std::max(shape.heads, 1)) {}
};

}  // namespace girih::kernels::delta_product

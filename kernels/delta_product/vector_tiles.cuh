// Sizes, shared memory and chunk data of a block of vector_gradients.
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
  static constexpr int kHalf = kThreads / 2;  // threads that have the same columns
  static constexpr int kCols = D / 2;         // columns of a warp, which has 16 rows
  // Resident blocks, limited by shared memory: 228 KB, before sm_90 164 KB.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocks = D == 64 ? 2 : 1;
#else
  static constexpr int kBlocks = D == 64 ? 4 : 2;
#endif
};

// Chunk data of a block, in shared memory to save registers.
struct VectorHere {
  int64_t batch, token, step;      // first token and first step of the chunk
  int tokens, steps;               // numbers of tokens and steps of the chunk
  int head, key_head, query_head;  // heads of the memory, of k, and the first of q
};

// Shared memory of a block.
template <typename T, int D>
struct VectorTiles {
  using Rows = PaddedTile<T, kDeltaRows, D>;
  using State = PaddedTile<T, D, D>;
  using Weights = PaddedTile<T, kDeltaRows, kDeltaRows>;
  static constexpr int kBytes =
      State::kBytes + 4 * Rows::kBytes + Weights::kBytes + static_cast<int>(sizeof(VectorHere));
  static_assert(VectorSizes<D>::kBlocks * (kBytes + 1024) <= 228 * 1024, "a block gives 1 KB away");
  static_assert(kDeltaFlag + 16 <= Weights::kBytes, "X is through before there are weights");

  State state;  // S^T, then dS^T
  Rows k, u, left, right;
  Weights weights;
  Prepared prepared;  // X and the flag, in the memory of the weights
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

// Divisors and sizes from which a block computes its chunk and head.
struct VectorGrid {
  Divider heads, each;  // memory heads; chunks of a sequence that is not packed
  Divider key_share, query_share;
  int tokens, members;  // tokens of a chunk; query heads of a memory head

  explicit VectorGrid(const DeltaShape& shape)
      : heads(std::max(shape.heads, 1)),
        each(chunks_of_each(shape)),
        key_share(shape.key_share),
        query_share(shape.query_share),
        tokens(delta_chunk(shape.n)),
        members(shape.query_heads / std::max(shape.heads, 1)) {}
};

}  // namespace girih::kernels::delta_product

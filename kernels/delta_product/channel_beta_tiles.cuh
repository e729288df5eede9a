// Sizes, shared memory and chunk data of a block of channel_beta_gradients.
#pragma once

#include "delta_product/channel_beta.h"
#include "delta_product/prepared.cuh"
#include "delta_product/work.cuh"
#include "tile/launch.h"
#include "tile/row_store.h"

namespace girih::kernels::delta_product {

template <int D>
struct ChannelBetaSizes {
  static constexpr int kThreads = 256;
  static constexpr int kHalfThreads = kThreads / 2;  // threads that have the same columns
  static constexpr int kCols = D / 2;                // columns of a warp, which has 16 rows
  // Resident blocks, limited by shared memory: 228 KB, before sm_90 164 KB.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocks = D == 64 ? 2 : 1;
#else
  static constexpr int kBlocks = D == 64 ? 4 : 2;
#endif
};

// Chunk data of a block, in shared memory to save registers.
struct ChannelBetaChunkInfo {
  int64_t batch, token, step;      // first token and first step of the chunk
  int tokens, steps;               // numbers of tokens and steps of the chunk
  int head, key_head, query_head;  // heads of the memory, of k, and the first of q
};

// Shared memory of a block.
template <typename T, int D>
struct ChannelBetaTiles {
  using Rows = PaddedTile<T, kDeltaChunkRows, D>;
  using State = PaddedTile<T, D, D>;
  using Weights = PaddedTile<T, kDeltaChunkRows, kDeltaChunkRows>;
  static constexpr int kBytes =
      State::kBytes + 4 * Rows::kBytes + Weights::kBytes + static_cast<int>(sizeof(ChannelBetaChunkInfo));
  static_assert(ChannelBetaSizes<D>::kBlocks * (kBytes + 1024) <= 228 * 1024,
                "the driver reserves 1 KB of a block");
  static_assert(kDeltaHasInverseLoOffset + 16 <= Weights::kBytes,
                "the last use of X precedes the first weights");

  State state;  // S^T, then dS^T
  Rows k, u, left, right;
  Weights weights;
  Prepared prepared;  // X and the flag, in the memory of the weights
  ChannelBetaChunkInfo* chunk_info;

  __device__ explicit ChannelBetaTiles(unsigned char* shared_start) {
    const auto allocate = [&](int bytes) {
      unsigned char* const start = shared_start;
      shared_start += bytes;
      return reinterpret_cast<T*>(start);
    };
    state.data = allocate(State::kBytes);
    k.data = allocate(Rows::kBytes), u.data = allocate(Rows::kBytes);
    left.data = allocate(Rows::kBytes), right.data = allocate(Rows::kBytes);
    prepared.data = shared_start;
    weights.data = allocate(Weights::kBytes);
    chunk_info = reinterpret_cast<ChannelBetaChunkInfo*>(shared_start);
  }
};

// Divisors and sizes from which a block computes its chunk and head.
struct ChannelBetaGrid {
  Divider heads, sequence_chunks;  // memory heads; chunks of a sequence that is not packed
  Divider key_share, query_share;
  int tokens, members;  // tokens of a chunk; query heads of a memory head

  explicit ChannelBetaGrid(const DeltaShape& shape)
      : heads(std::max(shape.heads, 1)),
        sequence_chunks(make_chunk_divider(shape)),
        key_share(shape.key_share),
        query_share(shape.query_share),
        tokens(delta_chunk_tokens(shape.n)),
        members(shape.output_heads / std::max(shape.heads, 1)) {}
};

}  // namespace girih::kernels::delta_product

// Building blocks of the Trellis kernels: the sequence, head and memory of a block, tiles of 16 tokens and
// their gates, stored memories, and a memory [M, X] in registers.
#pragma once

#include "pipe/state_store.h"
#include "tile/array.h"
#include "tile/launch.h"
#include "tile/pack.h"
#include "tile/row_store.h"
#include "trellis/kernels.h"
#include "trellis/maps.cuh"

namespace girih::kernels {

constexpr int kTokenTile = 16;  // tokens of a tile

// Gates of a token and head.
__device__ inline const TokenGate* gate_of(const TrellisShape& shape, const TokenGate* gates, int64_t batch,
                                           int64_t token, int head) {
  return gates + (batch * shape.grid.tokens.tokens + token) * shape.heads + head;
}

// Starts the copies of the gates of a tile of tokens; zeros from `rows` on. Called by one warp.
__device__ inline void load_gates(TokenGate* to, const TrellisShape& shape, const TokenGate* gates,
                                  int64_t batch, int64_t token, int rows, int head) {
  if (lane() >= kTokenTile) return;
  const bool has = lane() < rows;
  copy_async(shared_address(to + lane()), gate_of(shape, gates, batch, token + (has ? lane() : 0), head),
             has);
}

// The sequence, head and memory of a block. The memory is the index of the block in its pair, so it is also
// the rank of the block in a cluster of two.
struct TrellisBlockCoord {
  int64_t sequence;
  int head, memory;
  ChunkedSequence chunked;

  __device__ TrellisBlockCoord(const TrellisShape& shape, unsigned block)
      : sequence(head_index(shape, block) / static_cast<unsigned>(shape.heads)),
        head(static_cast<int>(head_index(shape, block) % static_cast<unsigned>(shape.heads))),
        memory(shape.memories == 1 ? kKeyMemory : static_cast<int>(block % 2)),
        chunked(chunked_sequence(shape.grid, sequence)) {}

 private:
  __device__ static unsigned head_index(const TrellisShape& shape, unsigned block) {
    return shape.memories == 1 ? block : block / 2;
  }
};
inline int64_t memory_block_count(const TrellisShape& shape) {
  return shape.memories * shape.grid.tokens.sequences * shape.heads;
}

// Row `token` of a head.
template <typename T>
__device__ inline const T* row_of(const InputTensor<4>& x, int64_t batch, int64_t token, int head) {
  return static_cast<const T*>(x.data) + offset_of(x, batch, token, head);
}
template <typename T>
__device__ inline T* row_of(const OutputTensor<4>& x, int64_t batch, int64_t token, int head) {
  return static_cast<T*>(x.data) + offset_of(x, batch, token, head);
}

// Calls f(n, i, offset) for the lane's elements of a state [N, H, M, X] in the layout of Accumulator:
// slots start at `row` and columns at `col`. Transposed: columns start at `row` and slots at `col`.
template <bool Transposed, int N, template <int> class Array, class F>
__device__ inline void for_each_element(const Array<4>& state, const TrellisBlockCoord& coord,
                                        const TrellisShape& shape, int row, int col, const F& f) {
  const int64_t base = offset_of(state, coord.sequence, coord.head);
  for_each_register<N>([&](int n, int i) {
    const int r = row + lane_row() + (i >> 1) * 8, c = col + 8 * n + lane_col() + (i & 1);
    const int m = Transposed ? c : r, x = Transposed ? r : c;
    if (m < shape.slots && x < shape.width(coord.memory)) {
      f(n, i, base + m * state.stride[2] + x * state.stride[3]);
    }
  });
}

template <bool Transposed = false, int N>
__device__ inline void add_state(Accumulator<N>& A, const InputTensor<4>& state,
                                 const TrellisBlockCoord& coord, const TrellisShape& shape, int row,
                                 int col = 0) {
  if (state.data == nullptr) return;
  for_each_element<Transposed, N>(state, coord, shape, row, col, [&](int n, int i, int64_t offset) {
    A.at[n][i] += static_cast<const float*>(state.data)[offset];
  });
}
template <int N>
__device__ inline void load_state(Accumulator<N>& A, const InputTensor<4>& state,
                                  const TrellisBlockCoord& coord, const TrellisShape& shape, int slot) {
  fill(A, 0.f);
  add_state(A, state, coord, shape, slot);
}
template <bool Transposed = false, int N>
__device__ inline void store_state(const OutputTensor<4>& state, const Accumulator<N>& A,
                                   const TrellisBlockCoord& coord, const TrellisShape& shape, int row,
                                   int col = 0) {
  for_each_element<Transposed, N>(state, coord, shape, row, col, [&](int n, int i, int64_t offset) {
    static_cast<float*>(state.data)[offset] = A.at[n][i];
  });
}

// Offset of the memory before chunk `number` among the stored memories.
template <int Width>
__device__ inline int64_t stored_memory_offset(const TrellisShape& shape, int64_t number, int head) {
  return (number * shape.heads + head) * (Width * Width);
}

// Copies block k of an A fragment from registers or from a tile.
template <int K>
__device__ inline void copy_a_block(uint32_t (&to)[4], const AFragment<K>& x, int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = x.at[k][i];
}
template <class Tile>
__device__ inline void copy_a_block(uint32_t (&to)[4], const PrecomputedTile<Tile>& x, int k) {
  load_block(to, x, 0, 16 * k);
}
// z = x A^T for 16 tokens and the warp's 16 slots. Even and odd blocks have their own accumulators, which
// halves the chain of dependent products.
template <typename T, class Left, int K>
__device__ inline void multiply_transposed(Accumulator<2>& z, const Left& x, const BFragment<K>& A) {
  Accumulator<2> odd;
  fill(z, 0.f);
  fill(odd, 0.f);
#pragma unroll
  for (int k = 0; k < K; k += 2) {
    uint32_t left[2][4];
    copy_a_block(left[0], x, k);
    copy_a_block(left[1], x, k + 1);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      mma<T>(z.at[j], left[0], A.at[k][2 * j], A.at[k][2 * j + 1]);
      mma<T>(odd.at[j], left[1], A.at[k + 1][2 * j], A.at[k + 1][2 * j + 1]);
    }
  }
  add(z, odd);
}

// Converts a block of an A fragment to fp32.
template <typename T>
__device__ inline void unpack(Accumulator<2>& x, const uint32_t (&raw)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair<T>(raw[i]);
    x.at[i >> 1][2 * (i & 1)] = pair.x, x.at[i >> 1][2 * (i & 1) + 1] = pair.y;
  }
}
// Loads a 16 x 16 block of a tile as fp32.
template <typename T, class Tile>
__device__ inline void load_block_fp32(Accumulator<2>& x, const Tile& tile, int row, int col) {
  uint32_t raw[4];
  load_block(raw, tile, row, col);
  unpack<T>(x, raw);
}

// Launches a block for each sequence, head and memory.
template <auto Kernel, class Storage, int Bytes, class Problem>
cudaError_t launch_memory_blocks(const Problem& p, cudaStream_t stream) {
  return launch_kernel<Kernel>(p, memory_block_count(p.shape), Storage::kThreads, Bytes, stream);
}

}  // namespace girih::kernels

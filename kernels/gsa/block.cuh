// Shared code of the blocks of gsa and gla. A block has one chunk and one query head and processes 64 columns
// of D or V at a time.
#pragma once

#include "gsa/kernels.h"
#include "gsa/reads.cuh"
#include "tile/launch.h"

namespace girih::kernels {

constexpr int kWarpgroupThreads = 128;  // a block has one or two warpgroups

// Rows of the state of a chunk, from row `first_row`. chunk is a number among all sequences.
template <typename T>
__device__ inline const T* state_rows(const void* states, const GsaShape& shape, int64_t chunk, int head,
                                      int first_row) {
  return static_cast<const T*>(states) +
         ((chunk * shape.heads + head) * (shape.D + shape.V) + first_row) * static_cast<int64_t>(shape.M);
}

// The block's chunk and query head.
struct ChunkBlock {
  const GsaShape& shape;
  const int warp, warpgroup;               // warp in the warpgroup, warpgroup in the block
  const int query_head, group_size, head;  // group_size: query heads of the memory head
  const int64_t chunk;
  TokenRange range;

  __device__ ChunkBlock(const GsaShape& shape, int warp, int warpgroup = 0)
      : shape(shape),
        warp(warp),
        warpgroup(warpgroup),
        query_head(static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.query_heads))),
        group_size(shape.query_heads / shape.heads),
        head(query_head / group_size),
        chunk(blockIdx.x / static_cast<unsigned>(shape.query_heads)),
        range(token_range_at(shape.tokens, chunk, kChunk)) {}

  // True for the first of the query heads that share the memory head.
  __device__ bool is_group_leader() const { return query_head % group_size == 0; }

  // Called by all threads of the block. Starts the copy of the rows of a head, from column `col`.
  template <int Threads, class Tile>
  __device__ void load(const Tile& tile, const InputTensor<4>& from, int from_head, int col,
                       int width) const {
    load_rows<Threads>(tile, from, range, from_head, col, width);
  }
  // Starts the copy of `rows` rows of the state, from row `first_row`.
  template <int Threads, class Tile>
  __device__ void load_states(const Tile& tile, const void* states, int first_row, int rows) const {
    load_async<Threads>(tile, state_rows<typename Tile::Element>(states, shape, chunk, head, first_row),
                        shape.M, rows, shape.M, threadIdx.x);
  }
  // Starts the copies of the gates and the weights.
  template <int Threads, class G, class S>
  __device__ void load_slots(const G& to_g, const InputTensor<4>& g, const S& to_s,
                             const InputTensor<4>& s) const {
    load<Threads>(to_g, g, head, 0, shape.M);
    load_weights<Threads>(to_s, s, g, range, head, shape.M);
    commit_copies();
  }
};

// Calls f(col) for columns col..col+63 of a memory. The copies of the first 64 columns are complete;
// load(col) starts the copies of the next 64 after all threads of the block have finished with the previous
// ones.
template <class Load, class F>
__device__ inline void for_each_slab(int width, const Load& load, const F& f) {
  for (int col = 0;; col += kSlab) {
    f(col);
    if (col + kSlab >= width) break;
    __syncthreads();
    load(col + kSlab);
    wait_copies<0>();
    __syncthreads();
  }
}

// For the warp's rows of X and 64 columns:   a += X Y^T,   sums += X H, H from column `first`.
template <Side side, typename T, int N, class Tile, class Other, class Memory>
__device__ inline void add_slab(Scores& a, Accumulator<N>& sums, const Tile& x, const Other& y,
                                const Memory& h, int warp, int first = 0) {
#pragma unroll 2
  for (int col = 0; col < kSlab; col += 16) {
    uint32_t block[4];
    load_block(block, x, kWarpRows * warp, col);
    add_scores<side, T>(a, block, y, col, warp);
    add_product<T>(sums, block, h, col, first);
  }
}

// Stores 16 rows and 8 * Eights columns of sums, from column 8 n0, to columns first_col.. of `cols` in global
// memory. The values pass through the warp's rows of the tile `staging`, from column `staging_col`, so that
// lanes store 16 bytes each.
template <typename T, int Eights = 8, int N>
__device__ inline void store_rows(const Accumulator<N>& sums, const SharedTile<T, kChunk, kSlab>& staging,
                                  int warp, const OutputTensor<4>& array, const TokenRange& range, int head,
                                  int first_col, int cols, int staging_col = 0, int n0 = 0) {
  T* to = chunk_rows<T>(array, range, head) + first_col;
  const int64_t stride = array.stride[1];
  const int rows = range.length;
  cols -= first_col;
  __syncwarp();
  for_each_register_pair<Eights>([&](int n, int i) {
    store_lane_pair<T>(staging, kWarpRows * warp + 8 * i, staging_col + 8 * n, sums.at[n0 + n][2 * i],
                       sums.at[n0 + n][2 * i + 1]);
  });
  __syncwarp();
  const int row = kWarpRows * warp + lane() / Eights, col = lane() % Eights * 8;
  const int left = col < cols ? rows - row : 0;
  to += row * stride + col;
#pragma unroll
  for (int i = 0; i < kWarpRows; i += 32 / Eights) {
    if (i < left)
      *reinterpret_cast<uint4*>(to) =
          *reinterpret_cast<const uint4*>(&staging.at(row + i, staging_col + col));
    to += 32 / Eights * stride;
  }
}

// The shared memory of a warp's 16 rows of a tile.
template <class Tile>
__device__ inline float* warp_scratch(const Tile& tile, int warp) {
  return reinterpret_cast<float*>(tile.data + kWarpRows * warp * Tile::kCols);
}

// Launches one block for each chunk and query head.
template <auto Kernel, class Problem>
cudaError_t launch_blocks(const Problem& p, int threads, int bytes, cudaStream_t stream) {
  const int64_t blocks = token_range_count(p.shape.tokens, kChunk) * p.shape.query_heads;
  return launch_kernel<Kernel>(p, blocks, threads, bytes, stream);
}

}  // namespace girih::kernels

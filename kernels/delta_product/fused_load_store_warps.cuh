// The load and store warps of scan_fused.
#pragma once

#include <type_traits>

#include "delta_product/fused_storage.cuh"
#include "delta_product/scan_roles.cuh"
#include "tile/row_store.h"

namespace girih::kernels::delta_product {

// The rows of a tile that a warp copies, 16 bytes a lane at a time: `Rows` rows. The swizzle repeats every
// eight rows, so addresses of later rows differ by constants.
template <int Rows, class Tile>
struct CopyRows {
  using T = typename Tile::Element;
  static_assert(std::is_same_v<Tile, BlockTile<T, Tile::kCols, Tile::kRows>>);
  static constexpr int kPacks = Tile::kCols / 8, kStep = 32 / kPacks, kEach = 8 / kStep;
  static constexpr int kMoves = Rows / kStep;
  static_assert(Rows % 8 == 0 && kPacks >= 8 && kPacks <= 32);

  int row, col;  // first of the lane
  uint32_t at[kEach];

  __device__ CopyRows(const Tile& tile, int first_row, int lane)
      : row(first_row + lane / kPacks), col(lane % kPacks * 8) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) at[i] = tile.address(row + i * kStep, col);
  }
  __device__ uint32_t address(int move) const {
    return at[move % kEach] + move / kEach * (8 * 64 * static_cast<int>(sizeof(T)));
  }
};

// Starts copies of a warp's rows of a matrix to a tile. `from` points to element (0, 0); elements outside of
// the matrix are zero.
template <int Rows, class Tile>
__device__ inline void start_copy_rows(const Tile& tile, const typename Tile::Element* from, int64_t stride,
                                       int rows, int cols, int first_row, int lane) {
  using Copy = CopyRows<Rows, Tile>;
  const Copy copy(tile, first_row, lane);
  const bool valid = copy.col < cols;
  from += copy.row * stride + copy.col;
  if (rows == Tile::kRows) {
#pragma unroll
    for (int i = 0; i < Copy::kMoves; ++i, from += Copy::kStep * stride) {
      copy_async(copy.address(i), from, valid);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Copy::kMoves; ++i, from += Copy::kStep * stride) {
      // A copy of 0 bytes does not access its source.
      copy_async(copy.address(i), from, valid && copy.row + i * Copy::kStep < rows);
    }
  }
}

// Stores a warp's rows of a tile to a matrix, `Batch` packs of a lane at a time.
template <int Rows, int Batch, class Tile>
__device__ inline void store_tile_rows(const Tile& tile, typename Tile::Element* to, int64_t stride, int rows,
                                       int cols, int first_row, int lane) {
  using Copy = CopyRows<Rows, Tile>;
  constexpr int kBatch = Batch < Copy::kMoves ? Batch : Copy::kMoves;
  static_assert(Copy::kMoves % kBatch == 0);
  const Copy copy(tile, first_row, lane);
  const int left = copy.col < cols ? rows - copy.row : 0;  // rows from the lane's first one
  to += copy.row * stride + copy.col;
#pragma unroll 2
  for (int i = 0; i < Copy::kMoves; i += kBatch) {
    uint32_t pack[kBatch][4];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint4 x = *static_cast<const uint4*>(__cvta_shared_to_generic(copy.address(i + j)));
      pack[j][0] = x.x, pack[j][1] = x.y, pack[j][2] = x.z, pack[j][3] = x.w;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j, to += Copy::kStep * stride) {
      if ((i + j) * Copy::kStep < left) store_pack(to, pack[j]);
    }
  }
}

// Load warp `which` of kLoadWarps: fills the stages.
template <typename T, int D, int Rows, int StateGroups>
__device__ inline void run_fused_load_warp(const ScanParams& params, const BlockWork& work,
                                           const FusedStorage<T, D, Rows, StateGroups>& storage, int which) {
  constexpr int kRows = kDeltaChunkRows / kLoadWarps;
  const DeltaScan& p = params.problem;
  const int n = p.shape.n, tokens = delta_chunk_tokens(n), first_row = which * kRows;
  const int64_t batch = work.range.sequence.batch;
  FusedBarriers& barriers = storage.barriers();
  const unsigned char* prepared = prepared_at(p.prepared, p.shape, work.first_chunk, work.head);
  int64_t row = work.range.start * n;
  PipelineState key_pipe;
#pragma unroll 1
  for (int c = 0; c < work.chunks; ++c) {
    barriers.empty.wait(key_pipe);
    const auto stage = storage.stage(key_pipe.stage);
    const int rows = chunk_length(work, tokens, c) * n, lane = recomputed_lane<StateGroups>();
    start_copy_rows<kRows>(stage.k(), at<T>(p.k, batch, row, work.head / p.shape.key_share, 0), p.k.stride[1],
                           rows, p.shape.D, first_row, lane);
    start_copy_rows<kRows>(storage.values(key_pipe.stage), at<T>(p.v, batch, row, work.head, work.col),
                           p.v.stride[1], rows, p.shape.V - work.col, first_row, lane);
    stage.start_prepared(prepared, 32 * which + lane);
    barriers.full.arrive_after_copies(key_pipe.stage);
    key_pipe.next(params.stages);
    row += tokens * n;
    prepared += int64_t{p.shape.heads} * kDeltaPreparedBytes;
  }
  commit_copies();
  wait_copies<0>();
}

// Store warp: stores the states before the chunks.
template <typename T, int D, int Rows, int StateGroups>
__device__ inline void run_fused_store_warp(const ScanParams& params, const BlockWork& work,
                                            const FusedStorage<T, D, Rows, StateGroups>& storage) {
  using State = typename FusedStorage<T, D, Rows, StateGroups>::State;
  store_states<T>(params, work, storage, [](const State& state, T* to, int rows, int cols) {
    store_tile_rows<State::kRows, StateGroups == 1 ? 8 : 4>(state, to, cols, rows, cols, 0,
                                                            recomputed_lane<StateGroups>());
  });
}

// Token warp `warp_of_role` of `Warps`: loads queries and stores outputs.
template <int Warps, typename T, int D, int Rows, int StateGroups>
__device__ inline void run_fused_token_warps(const ScanParams& params, const BlockWork& work,
                                             const FusedStorage<T, D, Rows, StateGroups>& storage,
                                             int warp_of_role) {
  // A warp loads and stores the same rows, so it overwrites only queries' memory that it has stored itself.
  constexpr int kRows = Rows / Warps, kBatch = StateGroups == 1 ? 8 : 4;
  const DeltaScan& p = params.problem;
  const int tokens = delta_chunk_tokens(p.shape.n), first_row = warp_of_role * kRows;
  const int64_t batch = work.range.sequence.batch;
  FusedBarriers& barriers = storage.barriers();
  const auto load_query = [&](int c, int stage) {
    if (c >= work.chunks) return;
    const T* const from =
        at<T>(p.q, batch, work.range.start + c * tokens, work.head / p.shape.query_share, 0);
    start_copy_rows<kRows>(storage.query(stage), from, p.q.stride[1], chunk_length(work, tokens, c),
                           p.shape.D, first_row, recomputed_lane<StateGroups>());
    barriers.query_full.arrive_after_copies(stage);
  };
#pragma unroll 1
  for (int c = 0; c < params.query_stages; ++c) load_query(c, c);
  PipelineState query_pipe;
#pragma unroll 1
  for (int c = 0; c < work.chunks; ++c) {
    T* const to = at<T>(p.o, batch, work.range.start + c * tokens, work.head, work.col);
    barriers.output_full.wait(query_pipe);
    store_tile_rows<kRows, kBatch>(storage.output(query_pipe.stage), to, p.o.stride[1],
                                   chunk_length(work, tokens, c), p.shape.V - work.col, first_row,
                                   recomputed_lane<StateGroups>());
    __syncwarp();
    load_query(c + params.query_stages, query_pipe.stage);
    query_pipe.next(params.query_stages);
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace girih::kernels::delta_product

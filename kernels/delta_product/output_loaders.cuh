// The load and store warps of scan_output.
#pragma once

#include <type_traits>

#include "delta_product/output_space.cuh"
#include "delta_product/scan_roles.cuh"
#include "tile/row_store.h"

namespace girih::kernels::delta_product {

// The rows of a tile that a warp copies, 16 bytes a lane at a time: `Rows` rows. The swizzle repeats every
// eight rows, so addresses of later rows differ by constants.
template <int Rows, class Tile>
struct MovedRows {
  using T = typename Tile::Element;
  static_assert(std::is_same_v<Tile, BlockTile<T, Tile::kCols, Tile::kRows>>);
  static constexpr int kPacks = Tile::kCols / 8, kStep = 32 / kPacks, kEach = 8 / kStep;
  static constexpr int kMoves = Rows / kStep;
  static_assert(Rows % 8 == 0 && kPacks >= 8 && kPacks <= 32);

  int row, col;  // first of the lane
  uint32_t at[kEach];

  __device__ MovedRows(const Tile& tile, int first_row, int lane)
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
__device__ inline void bring_rows(const Tile& tile, const typename Tile::Element* from, int64_t stride,
                                  int rows, int cols, int first_row, int lane) {
  using Mine = MovedRows<Rows, Tile>;
  const Mine mine(tile, first_row, lane);
  const bool valid = mine.col < cols;
  from += mine.row * stride + mine.col;
  if (rows == Tile::kRows) {
#pragma unroll
    for (int i = 0; i < Mine::kMoves; ++i, from += Mine::kStep * stride) {
      copy_async(mine.address(i), from, valid);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Mine::kMoves; ++i, from += Mine::kStep * stride) {
      // A copy of 0 bytes does not access its source.
      copy_async(mine.address(i), from, valid && mine.row + i * Mine::kStep < rows);
    }
  }
}

// Stores a warp's rows of a tile to a matrix, `Batch` packs of a lane at a time.
template <int Rows, int Batch, class Tile>
__device__ inline void save_rows(const Tile& tile, typename Tile::Element* to, int64_t stride, int rows,
                                 int cols, int first_row, int lane) {
  using Mine = MovedRows<Rows, Tile>;
  constexpr int kBatch = Batch < Mine::kMoves ? Batch : Mine::kMoves;
  static_assert(Mine::kMoves % kBatch == 0);
  const Mine mine(tile, first_row, lane);
  const int left = mine.col < cols ? rows - mine.row : 0;  // rows from the lane's first one
  to += mine.row * stride + mine.col;
#pragma unroll 2
  for (int i = 0; i < Mine::kMoves; i += kBatch) {
    uint32_t pack[kBatch][4];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint4 x = *static_cast<const uint4*>(__cvta_shared_to_generic(mine.address(i + j)));
      pack[j][0] = x.x, pack[j][1] = x.y, pack[j][2] = x.z, pack[j][3] = x.w;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j, to += Mine::kStep * stride) {
      if ((i + j) * Mine::kStep < left) store_pack(to, pack[j]);
    }
  }
}

// Load warp `which` of kLoaders: fills the stages.
template <typename T, int D, int Rows, int Chains>
__device__ inline void run_loader(const ScanPass& pass, const Part& part,
                                  const OutputSpace<T, D, Rows, Chains>& space, int which) {
  constexpr int kRows = kDeltaRows / kLoaders;
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), first_row = which * kRows;
  const int64_t batch = part.piece.sequence.batch;
  OutputBarriers& barriers = space.barriers();
  const unsigned char* prepared = prepared_at(p.prepared, p.shape, part.chunk, part.head);
  int64_t row = part.piece.start * n;
  Turn turn;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    wait(&barriers.empty[turn.place], turn.parity ^ 1);
    const auto stage = space.stage(turn.place);
    const int rows = tokens_in(part, tokens, c) * n, lane = lane_here<Chains>();
    bring_rows<kRows>(stage.k(), at<T>(p.k, batch, row, part.head / p.shape.key_share, 0), p.k.stride[1],
                      rows, p.shape.D, first_row, lane);
    bring_rows<kRows>(space.values(turn.place), at<T>(p.v, batch, row, part.head, part.col), p.v.stride[1],
                      rows, p.shape.V - part.col, first_row, lane);
    stage.start_prepared(prepared, 32 * which + lane);
    arrive_after_copies(&barriers.full[turn.place]);
    turn.next(pass.stages);
    row += tokens * n;
    prepared += int64_t{p.shape.heads} * kDeltaPreparedBytes;
  }
  commit_copies();
  wait_copies<0>();
}

// Store warp: stores the states before the chunks.
template <typename T, int D, int Rows, int Chains>
__device__ inline void run_states(const ScanPass& pass, const Part& part,
                                  const OutputSpace<T, D, Rows, Chains>& space) {
  using State = typename OutputSpace<T, D, Rows, Chains>::State;
  store_states<T>(pass, part, space, [](const State& state, T* to, int rows, int cols) {
    save_rows<State::kRows, Chains == 1 ? 8 : 4>(state, to, cols, rows, cols, 0, lane_here<Chains>());
  });
}

// Token warp `worker` of `Warps`: loads queries and stores outputs.
template <int Warps, typename T, int D, int Rows, int Chains>
__device__ inline void run_tokens(const ScanPass& pass, const Part& part,
                                  const OutputSpace<T, D, Rows, Chains>& space, int worker) {
  // A warp loads and stores the same rows, so it overwrites only queries' memory that it has stored itself.
  constexpr int kRows = Rows / Warps, kBatch = Chains == 1 ? 8 : 4;
  const DeltaScan& p = pass.scan;
  const int tokens = delta_chunk(p.shape.n), first_row = worker * kRows;
  const int64_t batch = part.piece.sequence.batch;
  OutputBarriers& barriers = space.barriers();
  const auto fetch = [&](int c, int place) {
    if (c >= part.chunks) return;
    const T* const from =
        at<T>(p.q, batch, part.piece.start + c * tokens, part.head / p.shape.query_share, 0);
    bring_rows<kRows>(space.query(place), from, p.q.stride[1], tokens_in(part, tokens, c), p.shape.D,
                      first_row, lane_here<Chains>());
    arrive_after_copies(&barriers.queried[place]);
  };
#pragma unroll 1
  for (int c = 0; c < pass.places; ++c) fetch(c, c);
  Turn place;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    T* const to = at<T>(p.o, batch, part.piece.start + c * tokens, part.head, part.col);
    wait(&barriers.output[place.place], place.parity);
    save_rows<kRows, kBatch>(space.output(place.place), to, p.o.stride[1], tokens_in(part, tokens, c),
                             p.shape.V - part.col, first_row, lane_here<Chains>());
    __syncwarp();
    fetch(c + pass.places, place.place);
    place.next(pass.places);
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace girih::kernels::delta_product

// Shared memory and loads of query_gradients.cuh. One ring has the rows of a tile of o, dout, q, k and v, and
// blocks of headers.
#pragma once

#include "cat_attention/sm90/ring.cuh"

namespace girih::kernels {

struct CatSm90QueryGradients {
  CatQueryGradients call;
  TensorMap q, dout, k, v, o;    // 128 rows of a head
  TensorMap header_k, header_v;  // 64 headers
  float* header_shares;          // own-chunk terms of headers; null if another kernel computes dk and dv
};

// The plan of a tile and lse of its queries.
struct CatSm90QueryTile {
  CatSm90Tile tile;
  float lse[kCatSm90Rows];
};

template <int Tile>
struct CatQuerySizes {
  // The stages of k and v of a tile stay in use until its own chunks are done; those of o, dout and q are
  // released before.
  static constexpr int kStages = 2 + (Tile == 64 ? 8 : 5);
  // A tile has at least five stages, and lse is loaded with the third. At that time all stages of the
  // previous user of this place have been read, up to the stage of v.
  static constexpr int kTiles = (kStages + 2 + 4) / 5;
};
template <typename T, int Tile>
using CatSm90QueryStorage = CatSm90Ring<T, Tile, CatQuerySizes<Tile>, CatSm90QueryTile>;

// Called by one warp.
template <typename T, int Tile>
__device__ inline void run_query_loader(const CatSm90QueryGradients& p,
                                        const CatSm90QueryStorage<T, Tile>& space) {
  using Storage = CatSm90QueryStorage<T, Tile>;
  const CatShape& shape = p.call.shape;
  auto& rest = space.rest();
  const unsigned tile_count = CatSm90TilePlan::tile_count(shape);
  PipelineState turn, tile;
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < tile_count; item += gridDim.x) {
    // After this wait, the previous plan in this place has been read.
    rest.empty.wait(turn);
    CatSm90QueryTile& tile_record = rest.tiles[tile.stage];
    const CatSm90TilePlan plan = tile_record.tile.compute_plan(shape, item);
    tile.next(Storage::kTiles);
    const int of = plan.head / shape.group();
#pragma unroll 1
    for (int block_order = -5; block_order < plan.blocks; ++block_order) {
      if (block_order == -3) {
        // cp.async needs no registers for the values; the loader has few registers.
        rest.empty.wait(turn);
#pragma unroll 1
        for (int i = lane(); i < kCatSm90Rows; i += 32) {
          const auto* const from = static_cast<const float*>(p.call.lse.data) +
                                   offset_of(p.call.lse, plan.batch, plan.row + i, plan.head);
          copy_async_4(shared_address(tile_record.lse + i), from, plan.row + i < shape.rows);
        }
        commit_copies();
      } else if (block_order == -1) {
        wait_copies<0>();
        __syncwarp();
      }
      if (lane() == 0) {
        uint64_t* const barrier = rest.full.at(turn.stage);
        rest.empty.wait(turn);
        arrive_expect_tx(barrier, Storage::kStage);
        if (block_order < 0) {
          const TensorMap& boxes = block_order == -5   ? p.o
                                   : block_order == -4 ? p.dout
                                   : block_order == -3 ? p.q
                                   : block_order == -2 ? p.k
                                                       : p.v;
          copy_rows(space.own(turn.stage), boxes,
                    {0, plan.row, block_order < -2 ? plan.head : of, plan.batch}, barrier);
        } else {
          space.tma_load_headers(turn.stage, p.header_k, p.header_v,
                                 {0, plan.first_header(block_order), of, plan.batch});
        }
      }
      space.arrive_for_racecheck(turn.stage);
      turn.next(Storage::kStages);
    }
    __syncwarp();
  }
}

}  // namespace girih::kernels

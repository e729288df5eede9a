// Shared memory and loads of query_gradients.cuh. One ring has the rows of a tile of o, dout, q, k and v, and
// blocks of headers.
#pragma once

#include "cat_attention/sm90/ring.cuh"

namespace girih::kernels {

struct CatGroupQueryGradients {
  CatQueryGradients call;
  Boxes q, dout, k, v, o;    // 128 rows of a head
  Boxes header_k, header_v;  // 64 headers
  float* shares;             // own-chunk terms of headers; null if another kernel computes dk and dv
};

// The plan of a tile and lse of its queries.
struct CatGroupQueryTile {
  CatGroupTile tile;
  float lse[kCatGroupRows];
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
using CatGroupQuerySpace = CatGroupRing<T, Tile, CatQuerySizes<Tile>, CatGroupQueryTile>;

// Called by one warp.
template <typename T, int Tile>
__device__ inline void load_queries(const CatGroupQueryGradients& p,
                                    const CatGroupQuerySpace<T, Tile>& space) {
  using Space = CatGroupQuerySpace<T, Tile>;
  const CatShape& shape = p.call.shape;
  auto& rest = space.rest();
  const unsigned items = CatGroupPlan::items(shape);
  Turn turn, tile;
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    // After this wait, the previous plan in this place has been read.
    wait(&rest.read[turn.place], turn.parity ^ 1);
    CatGroupQueryTile& described = rest.tiles[tile.place];
    const CatGroupPlan plan = described.tile.describe(shape, item);
    tile.next(Space::kTiles);
    const int of = plan.head / shape.group();
#pragma unroll 1
    for (int met = -5; met < plan.blocks; ++met) {
      if (met == -3) {
        // cp.async needs no registers for the values; the loader has few registers.
        wait(&rest.read[turn.place], turn.parity ^ 1);
#pragma unroll 1
        for (int i = lane(); i < kCatGroupRows; i += 32) {
          const auto* const from = static_cast<const float*>(p.call.lse.data) +
                                   offset_of(p.call.lse, plan.batch, plan.row + i, plan.head);
          copy_async_4(shared_address(described.lse + i), from, plan.row + i < shape.rows);
        }
        commit_copies();
      } else if (met == -1) {
        wait_copies<0>();
        __syncwarp();
      }
      if (lane() == 0) {
        uint64_t* const barrier = &rest.stage[turn.place];
        wait(&rest.read[turn.place], turn.parity ^ 1);
        arrive_expecting(barrier, Space::kStage);
        if (met < 0) {
          const Boxes& boxes = met == -5 ? p.o : met == -4 ? p.dout : met == -3 ? p.q : met == -2 ? p.k : p.v;
          copy_rows(space.own(turn.place), boxes, {0, plan.row, met < -2 ? plan.head : of, plan.batch},
                    barrier);
        } else {
          space.bring_headers(turn.place, p.header_k, p.header_v, {0, plan.first_of(met), of, plan.batch});
        }
      }
      space.come_too(turn.place);
      turn.next(Space::kStages);
    }
    __syncwarp();
  }
}

}  // namespace girih::kernels

// o and lse on sm_90. Two warpgroups multiply, 64 queries each; one warp of a third warpgroup loads by TMA,
// through one ring: the queries of a tile, the keys and the values of the same rows, and blocks of headers. A
// tile of queries attends to the rows of its own chunks first, which are in the tile: the triangle of a chunk
// is one product of a warp. Then it attends to blocks of headers; the partly masked blocks come first:
//
//     S = Q K^T        m' = max(m, S)        P = e^{scale (S - m')}        O <- e^{scale (m - m')} O + P V
//
// S of a block is in flight while P V of the previous block is added to O.
//
// The code is kept short because the instruction cache of a multiprocessor has 32 KB: one loop serves masked
// and unmasked blocks of headers, and only the loader computes the plan of a tile.
#pragma once

#include "cat_attention/sm90/ring.cuh"
#include "cat_attention/softmax.h"

namespace girih::kernels {

struct CatGroupForward {
  CatForward call;
  Boxes q, k, v;             // 128 rows of a head
  Boxes header_k, header_v;  // 64 headers
};

template <int Tile>
struct CatForwardSizes {
  static constexpr int kStages = Tile == 64 ? 9 : 7;
  // A tile has at least three stages, so this many tiles are in flight.
  static constexpr int kTiles = (kStages + 2) / 3;
};
template <typename T, int Tile>
using CatGroupSpace = CatGroupRing<T, Tile, CatForwardSizes<Tile>, CatGroupTile>;

// Called by one warp.
template <typename T, int Tile>
__device__ inline void load_forward(const CatGroupForward& p, const CatGroupSpace<T, Tile>& space) {
  using Space = CatGroupSpace<T, Tile>;
  const CatShape& shape = p.call.shape;
  auto& rest = space.rest();
  const unsigned items = CatGroupPlan::items(shape);
  Turn turn, tile;
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    // After this wait, the previous plan in this place has been read.
    wait(&rest.read[turn.place], turn.parity ^ 1);
    const CatGroupPlan plan = rest.tiles[tile.place].describe(shape, item);
    tile.next(Space::kTiles);
    const int of = plan.head / shape.group();
#pragma unroll 1
    for (int met = -3; met < plan.blocks; ++met) {
      if (lane() == 0) {
        uint64_t* const barrier = &rest.stage[turn.place];
        wait(&rest.read[turn.place], turn.parity ^ 1);
        arrive_expecting(barrier, Space::kStage);
        if (met < 0) {
          const Boxes& boxes = met == -3 ? p.q : met == -2 ? p.k : p.v;
          const BoxPlace at{0, plan.row, met == -3 ? plan.head : of, plan.batch};
          copy_rows(space.own(turn.place), boxes, at, barrier);
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

template <typename T, int Tile>
struct CatGroupPass : CatRingPlace<CatGroupSpace<T, Tile>> {
  using Space = CatGroupSpace<T, Tile>;
  using CatRingPlace<Space>::rest, CatRingPlace<Space>::tile;
  using CatRingPlace<Space>::next, CatRingPlace<Space>::done;
  using Scores = Sums<kCatGroupKeys / 8>;
  using Weights = Operand<kCatGroupKeys / 16>;

  const CatGroupForward& p;
  const Space& space;
  const CatScale scale;
  int from;  // first row of the warp in the tile
  CatGroupPlan plan;
  CatRows rows;
  Operand<Tile / 16> q;
  Sums<Tile / 8> o;
  CatSoftmax<T> softmax;

  __device__ CatGroupPass(const CatGroupForward& p, const Space& space)
      : CatRingPlace<Space>{space.rest(), {}, {}},
        p(p),
        space(space),
        scale(p.call.shape.scale),
        from(16 * warp_index()) {}

  __device__ void begin() {
    const int place = next();
    const CatGroupTile& of = rest.tiles[tile.place];
    plan = of.read();
    rows = of.rows(p.call.shape, plan, from);
    tile.next(Space::kTiles);
    load_blocks(q, space.own(place), from);
    if (scale.sign != 0) {
#pragma unroll
      for (int k = 0; k < Tile / 16; ++k) scale.apply_sign(q.at[k]);
    }
    done(place);
    fill(o, 0.f);
    softmax = CatSoftmax<T>();
  }

  // The rows of the warp's own chunks, in blocks of 16 x 16.
  __device__ void own() {
    const CatShape& shape = p.call.shape;
    const int keys = next(), first = from & -max(shape.size, 16);
    int values = 0;
#pragma unroll 1
    for (int key = first; key <= from; key += 16) {
      Sums<2> s;
      fill(s, 0.f);
      add_product_transposed<T>(s, q, space.own(keys), key);
      for_pairs(rows, shape, plan.row + from, plan.row + key, [&](int n, int e, bool seen) {
        if (!seen) s.at[n][e] = -INFINITY;
      });
      const float2 by = softmax.add(s, scale);
      if (key == first) {
        values = next();
      } else {
        scale_rows(o, by);
      }
      Operand<1> weights;
      round_to<T>(weights, s);
      add_product<T>(o, weights, space.own(values), key);
    }
    done(keys), done(values);
  }

  // S of a block becomes P; returns the factors for O.
  __device__ float2 weigh(Scores& s, int met) {
    if (met < plan.parts()) {
      const int first = plan.first_of(met) + lane_col();
      each_sum<kCatGroupKeys / 8>([&](int n, int e) {
        if (!rows.header(e >> 1, first + 8 * n + (e & 1))) s.at[n][e] = -INFINITY;
      });
    }
    return softmax.add(s, scale);
  }

  __device__ void headers() {
    if (plan.blocks == 0) return;
    Scores s;
    Weights weights;
    int before = next();
    fence_products(s);
    start_product_transposed<T, false>(s, q, space.keys(before));
    commit_products();
    wait_products<0>(s);
    scale_rows(o, weigh(s, 0));
    round_to<T>(weights, s);
#pragma unroll 1
    for (int met = 1; met < plan.blocks; ++met) {
      const int place = next();
      fence_products(s, o);
      start_product_transposed<T, false>(s, q, space.keys(place));
      commit_products();
      start_product<T>(o, weights, space.values(before));
      commit_products();
      wait_products<1>(s);
      const float2 by = weigh(s, met);
      wait_products<0>(o);
      keep(weights);
      done(before);
      before = place;
      scale_rows(o, by);
      round_to<T>(weights, s);
    }
    fence_products(o);
    start_product<T>(o, weights, space.values(before));
    commit_products();
    wait_products<0>(o);
    keep(weights);
    done(before);
  }

  // Stores o = O / sum in packs of 16 bytes, and lse.
  __device__ void store() const {
    const CatForward& call = p.call;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = plan.row + from + lane_row() + 8 * i;
      const bool inside = rows.first[i] != kCatOutside;
      const float sum = sum_over_row(softmax.sum[i]), by = inside ? reciprocal(sum) : 0.f;
      if (call.lse.data != nullptr && lane_col() == 0 && row < call.shape.rows) {
        static_cast<float*>(call.lse.data)[offset_of(call.lse, plan.batch, row, plan.head)] =
            inside ? softmax.log_sum(i, sum, scale) : INFINITY;
      }
      T* const to = row_of<T>(call.o, plan.batch, row, plan.head);
      store_row(to, o, i, by, call.shape.V, row < call.shape.rows);
    }
  }

  __device__ void run() {
    const unsigned items = CatGroupPlan::items(p.call.shape);
#pragma unroll 1
    for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
      begin();
      own();
      headers();
      store();
    }
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatGroupThreads, 1)
    cat_group_forward_kernel(const __grid_constant__ CatGroupForward p) {
  if constexpr (kCatGroups) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const CatGroupSpace<T, Tile> space{shared};
    run_groups<CatGroupRegisters<232, 40>>([&] { space.init(); }, [&] { load_forward(p, space); },
                                           [&] { CatGroupPass<T, Tile>(p, space).run(); });
  }
}

template <typename T, int Tile>
cudaError_t try_cat_group_forward(const CatForward& call, cudaStream_t stream, bool& taken) {
  using Space = CatGroupSpace<T, Tile>;
  const CatShape& shape = call.shape;
  taken = false;
  bool has = false;
  if (const cudaError_t error = has_warpgroups<cat_group_forward_kernel<T, Tile>>(has); error != cudaSuccess)
    return error;
  const int64_t items = query_tiles(shape);
  if (!has || !cat_fills_groups(shape) || items == 0) return cudaSuccess;
  CatGroupForward p{call, {}, {}, {}, {}, {}};
  for (const cudaError_t error : {describe_tile(p.q, call.q, shape, shape.query_heads, shape.D),
                                  describe_tile(p.k, call.k, shape, shape.heads, shape.D),
                                  describe_tile(p.v, call.v, shape, shape.heads, shape.V),
                                  describe_headers(p.header_k, call.k, shape, shape.D),
                                  describe_headers(p.header_v, call.v, shape, shape.V)}) {
    if (error != cudaSuccess) return error;
  }
  taken = true;
  return launch_groups<cat_group_forward_kernel<T, Tile>>(p, items, Space::kBytes, stream);
}

}  // namespace girih::kernels

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

struct CatSm90Forward {
  CatForward call;
  TensorMap q, k, v;             // 128 rows of a head
  TensorMap header_k, header_v;  // 64 headers
};

template <int Tile>
struct CatForwardSizes {
  static constexpr int kStages = ring_stages(Tile == 64 ? 9 : 7);
  // A tile has at least three stages, so this many tiles are in flight.
  static constexpr int kTiles = (kStages + 2) / 3;
};
template <typename T, int Tile>
using CatSm90ForwardStorage = CatSm90Ring<T, Tile, CatForwardSizes<Tile>, CatSm90Tile>;

// Called by one warp.
template <typename T, int Tile>
__device__ inline void run_forward_loader(const CatSm90Forward& p,
                                          const CatSm90ForwardStorage<T, Tile>& space) {
  using Storage = CatSm90ForwardStorage<T, Tile>;
  const CatShape& shape = p.call.shape;
  auto& rest = space.rest();
  const unsigned tile_count = CatSm90TilePlan::tile_count(shape);
  PipelineState turn, tile;
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < tile_count; item += gridDim.x) {
    // After this wait, the previous plan in this place has been read.
    rest.empty.wait(turn);
    const CatSm90TilePlan plan = rest.tiles[tile.stage].compute_plan(shape, item);
    tile.next(Storage::kTiles);
    const int of = plan.head / shape.group();
#pragma unroll 1
    for (int block_order = -3; block_order < plan.blocks; ++block_order) {
      if (lane() == 0) {
        uint64_t* const barrier = rest.full.at(turn.stage);
        rest.empty.wait(turn);
        arrive_expect_tx(barrier, Storage::kStage);
        if (block_order < 0) {
          const TensorMap& boxes = block_order == -3 ? p.q : block_order == -2 ? p.k : p.v;
          const TmaCoords at{0, plan.row, block_order == -3 ? plan.head : of, plan.batch};
          copy_rows(space.own(turn.stage), boxes, at, barrier);
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

template <typename T, int Tile>
struct CatSm90ForwardMainloop : CatRingConsumer<CatSm90ForwardStorage<T, Tile>> {
  using Storage = CatSm90ForwardStorage<T, Tile>;
  using CatRingConsumer<Storage>::rest, CatRingConsumer<Storage>::tile;
  using CatRingConsumer<Storage>::next, CatRingConsumer<Storage>::done;
  using Scores = Accumulator<kCatSm90Keys / 8>;
  using Weights = AFragment<kCatSm90Keys / 16>;

  const CatSm90Forward& p;
  const Storage& space;
  const CatScale scale;
  int from;  // first row of the warp in the tile
  CatSm90TilePlan plan;
  CatLaneRows rows;
  AFragment<Tile / 16> q;
  Accumulator<Tile / 8> o;
  CatSoftmax<T> softmax;

  __device__ CatSm90ForwardMainloop(const CatSm90Forward& p, const Storage& space)
      : CatRingConsumer<Storage>{space.rest(), {}, {}},
        p(p),
        space(space),
        scale(p.call.shape.scale),
        from(16 * warp_index()) {}

  __device__ void begin() {
    const int place = next();
    const CatSm90Tile& of = rest.tiles[tile.stage];
    plan = of.read();
    rows = of.rows(p.call.shape, plan, from);
    tile.next(Storage::kTiles);
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
      Accumulator<2> s;
      fill(s, 0.f);
      add_product_transposed<T>(s, q, space.own(keys), key);
      for_each_score(rows, shape, plan.row + from, plan.row + key, [&](int n, int e, bool visible) {
        if (!visible) s.at[n][e] = -INFINITY;
      });
      const float2 by = softmax.add(s, scale);
      if (key == first) {
        values = next();
      } else {
        scale_rows(o, by);
      }
      AFragment<1> weights;
      round_to_a_fragment<T>(weights, s);
      add_product<T>(o, weights, space.own(values), key);
    }
    done(keys), done(values);
  }

  // S of a block becomes P; returns the factors for O.
  __device__ float2 weigh(Scores& s, int block_order) {
    if (block_order < plan.masked_blocks()) {
      const int first = plan.first_header(block_order) + lane_col();
      for_each_register<kCatSm90Keys / 8>([&](int n, int e) {
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
    wgmma_fence(s);
    wgmma_start_transposed<T, false>(s, q, space.keys(before));
    wgmma_commit();
    wgmma_wait<0>(s);
    scale_rows(o, weigh(s, 0));
    round_to_a_fragment<T>(weights, s);
#pragma unroll 1
    for (int block_order = 1; block_order < plan.blocks; ++block_order) {
      const int place = next();
      wgmma_fence(s, o);
      wgmma_start_transposed<T, false>(s, q, space.keys(place));
      wgmma_commit();
      wgmma_start<T>(o, weights, space.values(before));
      wgmma_commit();
      wgmma_wait<1>(s);
      const float2 by = weigh(s, block_order);
      wgmma_wait<0>(o);
      keep_registers(weights);
      done(before);
      before = place;
      scale_rows(o, by);
      round_to_a_fragment<T>(weights, s);
    }
    wgmma_fence(o);
    wgmma_start<T>(o, weights, space.values(before));
    wgmma_commit();
    wgmma_wait<0>(o);
    keep_registers(weights);
    done(before);
  }

  // Stores o = O / sum in packs of 16 bytes, and lse.
  __device__ void store() const {
    const CatForward& call = p.call;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = plan.row + from + lane_row() + 8 * i;
      const bool inside = rows.first[i] != kCatNoSequence;
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
    const unsigned tile_count = CatSm90TilePlan::tile_count(p.call.shape);
#pragma unroll 1
    for (unsigned item = blockIdx.x; item < tile_count; item += gridDim.x) {
      begin();
      own();
      headers();
      store();
    }
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatSm90Threads, 1)
    cat_forward_sm90_kernel(const __grid_constant__ CatSm90Forward p) {
  if constexpr (kIsCatSm90Compiled) {
    GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
    const CatSm90ForwardStorage<T, Tile> space{shared};
    run_warp_roles<CatSm90Registers<232, 40>>([&] { space.init(); }, [&] { run_forward_loader(p, space); },
                                              [&] { CatSm90ForwardMainloop<T, Tile>(p, space).run(); });
  }
}

template <typename T, int Tile>
cudaError_t launch_cat_forward_sm90(const CatForward& call, cudaStream_t stream) {
  using Storage = CatSm90ForwardStorage<T, Tile>;
  const CatShape& shape = call.shape;
  CatSm90Forward p{call, {}, {}, {}, {}, {}};
  for (const cudaError_t error : {describe_tile(p.q, call.q, shape, shape.query_heads, shape.D),
                                  describe_tile(p.k, call.k, shape, shape.heads, shape.D),
                                  describe_tile(p.v, call.v, shape, shape.heads, shape.V),
                                  describe_headers(p.header_k, call.k, shape, shape.D),
                                  describe_headers(p.header_v, call.v, shape, shape.V)}) {
    if (error != cudaSuccess) return error;
  }
  return launch_persistent<cat_forward_sm90_kernel<T, Tile>>(p, count_query_tiles(shape), Storage::kBytes,
                                                             stream);
}

}  // namespace girih::kernels

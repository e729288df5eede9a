// A block of the gradients: what it has, and its phases in the order in which they come.
#pragma once

#include "delta_product/gradient_gates.cuh"
#include "delta_product/gradient_loads.cuh"
#include "delta_product/gradient_rows.cuh"
#include "delta_product/gradient_tiles.cuh"
#include "delta_product/gradient_weights.cuh"

namespace girih::kernels::delta_product {

// OneSlab: V is no wider; then what is summed over slabs needs no registers before them.
template <typename T, int D, bool OneSlab, Factors factors>
struct GradientBlock {
  using Sizes = GradientSizes<D>;
  using Tiles = GradientTiles<T, D, OneSlab>;
  using Gradient = Sums<Sizes::kCols / 8>;
  static constexpr int kThreads = Sizes::kThreads, kGroup = 128;  // of a warpgroup
  static constexpr bool kBoth = Sizes::kGroups == 1;              // one warpgroup has N and dP
  static constexpr bool kOwn = Tiles::kOwn, kAside = Tiles::kAside;
  static constexpr bool kDirect = factors == Factors::none, kGates = factors == Factors::any,
                        kScaled = kScalesBefore<T, factors>;

  const DeltaGradients& p;
  const Tiles& tile;
  const GradientLoads<T, D, OneSlab> loads;
  const Here& here;
  const Prepared prepared;
  const Vectors vectors;
  const int warp;
  WarpPlace place;
  const bool gated, unit_rows, many_tokens;
  const bool late;  // queries come once U is through, or dS, whose room they get
  bool has_edge, has_tokens, has_values;

  Edge<T, D, OneSlab> of_states;
  Gradient dq, dk;
  Sums<8> of_steps;  // G U^T
  Sums<8> both;      // do U^T, where one warpgroup has both
  float2 of_beta = {0.f, 0.f}, read_of_g = {0.f, 0.f};

  __device__ GradientBlock(const DeltaGradients& p, const GradientBoxes& boxes, const Tiles& tile,
                           bool many_tokens)
      : p(p),
        tile(tile),
        loads(p, boxes, tile),
        here(*tile.here),
        prepared{tile.prepared},
        vectors(prepared.vectors()),
        warp(warp_index()),
        gated(kGates && p.gated),
        unit_rows(!kDirect && p.shape.unit),
        many_tokens(many_tokens),
        late(kOwn || (kAside && many_tokens)) {
    place.group = kBoth ? 0 : warp / 4, place.band = warp % 4;
    place.row = kTileRows * place.band, place.mine = place.row + lane_row();
    place.col = Sizes::kCols * place.group;
  }

  // Whether there is a chunk; then its first loads are under way.
  __device__ bool start(const GradientGrid& grid);

  // gradient_slab.cuh: products with the states and with U, of columns of V from `v` on.
  __device__ void take_slab(int v);
  __device__ void add_edge(int v);
  __device__ void put_values(int v) const;
  __device__ void make_amiss(const Sums<8>& ks, bool last);
  __device__ void read_states();
  __device__ void solve() const;
  __device__ void start_steps();
  __device__ void write_states();
  __device__ void add_slabs(int v, bool last);

  // gradient_finish.cuh: products with N and dP, once all of V is through. `left`: the left factor of those
  // under way.
  __device__ void weigh(const Divider& steps, Operand<kTilesDown>& left);
  __device__ void start_left(const Operand<kTilesDown>& left, Gradient& sums) const;
  __device__ void start_dq(Operand<kTilesDown>& left);
  template <int Bands>
  __device__ void add_queries(const Operand<kTilesDown>& left);
  __device__ void add_keys(Operand<kTilesDown>& left);
  __device__ void finish_lengths();
  __device__ void put() const;

  __device__ Sums<8>& of_queries() { return kBoth ? both : of_steps; }
  __device__ static float power(float x) { return kGates ? exp2_fast(x) : 1.f; }
  __device__ float2 of_rows(int vector) const { return vectors.rows(vector, place.mine); }
  __device__ float2 logs() const { return kGates ? of_rows(kDeltaLog) : make_float2(0.f, 0.f); }
  __device__ float end_log() const { return kGates ? vectors.element(kDeltaLog, kDeltaRows - 1) : 0.f; }
  // L_C less L. The power is held at 2^-60, so that a quotient by it stays in range; what that lets through
  // of U dS^T is 2^-60 of it.
  __device__ float until_end(float log) const { return fmaxf(end_log() - log, -60.f); }
  // Of beta what the rows of G do not have yet.
  __device__ float2 steps_left(float2 steps) const {
    return divides<T>(p, prepared) ? make_float2(1.f, 1.f) : steps;
  }
  // Of dk, a memory head's other query heads have their part of dP alone: all else comes in times zero.
  __device__ float2 first_only(float2 x) const { return here.first ? x : make_float2(0.f, 0.f); }
  template <class Tile>
  __device__ WarpRows<Tile> rows_of(const Tile& of, int col) const {
    return WarpRows<Tile>(tile.origin, of, col);
  }
  // The first of the warpgroup's columns of a slab. Of one slab with gates there is no register to keep what
  // follows from it.
  __device__ int of_values() const {
    return kAside && kGates ? worked_out_here(64 * place.group) : 64 * place.group;
  }

  __device__ void group_barrier() const {
    place.group == 0 ? barrier_wait(1, kGroup) : barrier_wait(2, kGroup);
  }
  // Where the other warpgroup alone has `times` of them.
  __device__ void group_barrier_for_racecheck(int times = 1) const {
    for (int i = 0; kCountsBarriers && i < times; ++i) group_barrier();
  }
};

}  // namespace girih::kernels::delta_product

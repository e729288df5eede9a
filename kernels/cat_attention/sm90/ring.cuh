// The ring of loads of the warpgroup kernels. A stage has 128 rows of a tile, or the keys and the values of
// 64 headers. The plans of the tiles in flight are behind the stages.
#pragma once

#include "cat_attention/sm90/storage.cuh"

namespace girih::kernels {

// Sizes: kStages and kTiles, the number of plans.
template <typename T, int Tile, class Sizes, class Described>
struct CatSm90Ring {
  static constexpr int kStages = Sizes::kStages, kTiles = Sizes::kTiles;
  using Own = BlockTile<T, Tile, kCatSm90Rows>;
  using Headers = BlockTile<T, Tile, kCatSm90Keys>;
  struct Rest {
    Described tiles[kTiles];
    FullBarriers<kStages> full;
    EmptyBarriers<kStages> empty;
  };
  static constexpr int kStage = Own::kBytes;
  static_assert(kStage == 2 * Headers::kBytes);
  static constexpr int kBytes = kStages * kStage + static_cast<int>(sizeof(Rest));
  static_assert(kBytes <= kCatSm90MaxBytes);

  unsigned char* shared;

  __device__ T* stage(int n) const { return reinterpret_cast<T*>(shared + n * kStage); }
  __device__ Own own(int n) const { return {stage(n)}; }
  __device__ Headers keys(int n) const { return {stage(n)}; }
  __device__ Headers values(int n) const { return {stage(n) + kCatSm90Keys * Tile}; }
  __device__ Rest& rest() const { return *reinterpret_cast<Rest*>(shared + kStages * kStage); }
  __device__ void init() const {
    rest().full.init(arrival_count(1));
    rest().empty.init(arrival_count(kCatSm90MmaWarps));
  }

  // Called by the loading warp after its first lane has arrived at the barrier of stage n. The writes of the
  // other lanes are visible with the stage, as the warp has synchronised before. (Racecheck needs their own
  // arrivals, shared.h.)
  __device__ void arrive_for_racecheck(int n) const {
#ifdef GIRIH_RACECHECK
    __syncwarp();
    if (lane() != 0) rest().full.arrive(n);
    __syncwarp();
#endif
  }

  // Loads headers from row `at` to stage n; its barrier expects these bytes.
  __device__ void tma_load_headers(int n, const TensorMap& k_map, const TensorMap& v_map,
                                   TmaCoords at) const {
    copy_rows(keys(n), k_map, at, rest().full.at(n));
    copy_rows(values(n), v_map, at, rest().full.at(n));
  }
};

// The position of a multiplying warp in the ring.
template <class Ring>
struct CatRingConsumer {
  typename Ring::Rest& rest;
  PipelineState turn, tile;

  // Waits for the next stage and returns its index.
  __device__ int next() {
    const int place = turn.stage;
    rest.full.wait(turn);
    turn.next(Ring::kStages);
    return place;
  }
  __device__ void done(int place) const { rest.empty.arrive_warp(place); }
};

}  // namespace girih::kernels

// What the blocks of query_gradients.cuh have in shared memory, and who brings it.
#pragma once

#include "cat_attention/sm90/space.cuh"

namespace girih::kernels {

struct CatGroupQueryGradients {
  CatQueryGradients call;
  Boxes q, dout, k, v, o;    // 128 rows of a head
  Boxes header_k, header_v;  // 64 headers
  float* shares;             // of headers; null where another kernel has dk and dv
};

template <typename T, int Tile>
struct CatGroupQuerySpace {
  static constexpr int kStages = Tile == 64 ? 6 : 3, kOwn = 4;
  using Own = BlockTile<T, Tile, kCatGroupRows>;
  using Headers = BlockTile<T, Tile, kCatGroupKeys>;
  struct Barriers {
    uint64_t own, own_read, stage[kStages], read[kStages];
  };
  // A stage: headers' keys and values, or what 128 rows have put out.
  static constexpr int kStage = 2 * Headers::kBytes;
  static_assert(kStage == Own::kBytes);
  static constexpr int kBytes = kOwn * Own::kBytes + kStages * kStage + static_cast<int>(sizeof(Barriers));
  static_assert(kBytes <= kCatGroupBytes);

  unsigned char* shared;

  // q, dout, k, v
  __device__ Own own(int which) const { return {reinterpret_cast<T*>(shared + which * Own::kBytes)}; }
  __device__ T* stage(int n) const { return reinterpret_cast<T*>(shared + kOwn * Own::kBytes + n * kStage); }
  __device__ Own output(int n) const { return {stage(n)}; }
  __device__ Headers keys(int n) const { return {stage(n)}; }
  __device__ Headers values(int n) const { return {stage(n) + kCatGroupKeys * Tile}; }
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(shared + kOwn * Own::kBytes + kStages * kStage);
  }
  __device__ void init() const {
    Barriers& all = barriers();
    init_barrier(&all.own, 1), init_barrier(&all.own_read, once(kCatGroupWarps));
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&all.stage[i], 1), init_barrier(&all.read[i], once(kCatGroupWarps));
    }
  }
};

// By one thread.
template <typename T, int Tile>
__device__ inline void load_queries(const CatGroupQueryGradients& p,
                                    const CatGroupQuerySpace<T, Tile>& space) {
  using Space = CatGroupQuerySpace<T, Tile>;
  const CatShape& shape = p.call.shape;
  auto& barriers = space.barriers();
  const unsigned items = CatGroupPlan::items(shape);
  // The tile's own, a tensor at a time: the next tile's come between blocks of headers.
  unsigned tiles = 0;
  const auto own = [&](unsigned item, int which) {
    const CatGroupPlan plan(shape, item);
    if (which == 0) {
      wait(&barriers.own_read, (tiles++ & 1) ^ 1);
      arrive_expecting(&barriers.own, Space::kOwn * Space::Own::kBytes);
    }
    const Boxes& boxes = which == 0 ? p.q : which == 1 ? p.dout : which == 2 ? p.k : p.v;
    const BoxPlace at{0, plan.row, which < 2 ? plan.head : plan.head / shape.group(), plan.batch};
    copy_rows(space.own(which), boxes, at, &barriers.own);
  };
  if (blockIdx.x < items) {
    for (int which = 0; which < Space::kOwn; ++which) own(blockIdx.x, which);
  }
  Turn turn;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const CatGroupPlan plan(shape, item);
    const unsigned next = item + gridDim.x;
    int which = next < items ? 0 : Space::kOwn;
    for (int met = -1; met < plan.blocks; ++met) {
      // By then the stages are full, and the tile's own have been read.
      if (met >= Space::kStages && which < Space::kOwn) own(next, which++);
      uint64_t* const barrier = &barriers.stage[turn.place];
      wait(&barriers.read[turn.place], turn.parity ^ 1);
      arrive_expecting(barrier, Space::kStage);
      if (met < 0) {
        copy_rows(space.output(turn.place), p.o, {0, plan.row, plan.head, plan.batch}, barrier);
      } else {
        const BoxPlace at{0, plan.first_of(met), plan.head / shape.group(), plan.batch};
        copy_rows(space.keys(turn.place), p.header_k, at, barrier);
        copy_rows(space.values(turn.place), p.header_v, at, barrier);
      }
      turn.next(Space::kStages);
    }
    while (which < Space::kOwn) own(next, which++);
  }
}

}  // namespace girih::kernels

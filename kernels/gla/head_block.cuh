// A block of the read: which columns of which head it has, its shared memory, and its roles.
#pragma once

#include "gla/head_gates.cuh"
#include "gla/launch.h"
#include "gsa/gradients.cuh"
#include "gsa/walk.cuh"

namespace girih::kernels {

// Warps by role; a thread of each has so many registers: 480 for the five warpgroups together, which start
// with 96 each. A keeper has 16 values and up to 128 keys of the state.
constexpr int kLoaders = 4;
constexpr int kPublishers = 4;
template <int D>
constexpr int kKeepers = D <= 128 ? 4 : 8;
template <int D>
constexpr int kReaders = 12 - kKeepers<D>;
constexpr int kFirstKeeper = kLoaders + kPublishers;
constexpr int kHeadReadThreads = 32 * 20;
constexpr int kLoaderRegisters = 64, kPublisherRegisters = 32, kProductRegisters = 128;
static_assert(kLoaderRegisters + kPublisherRegisters + 3 * kProductRegisters <= 5 * 96);
constexpr int kGatesAhead = 4;  // turns that gates are brought to the L2 cache before
constexpr int kMaxStages = 6, kMaxValues = 6;
constexpr int kMaxSlots = 4;

template <typename T, int D>
using HeadState = BlockTile<T, D>;  // S^T, [64 values, D]

template <typename T, int D>
struct HeadStage {
  BlockTile<T, D> q, k;

  static constexpr int kBytes = 2 * BlockTile<T, D>::kBytes;

  __device__ explicit HeadStage(unsigned char* shared) { Layout(shared)(q)(k); }
};

template <typename T>
using HeadValues = BlockTile<T, kSlab>;

// Whether readers have q in registers: its rows are read once for two products, and its stage is free once
// the scores are there, a turn and a half before the chunk's values are. Its place is not theirs then for
// rows on their way out: they have their own.
template <int D>
constexpr bool kHoldsQueries = D <= 128;
template <typename T, int D>
constexpr int kOutBytes = kHoldsQueries<D> ? kReaders<D> / 4 * HeadValues<T>::kBytes : 0;

// What lies before the rest: stages, values, slots, rows on their way out.
struct HeadRing {
  float sums[kMaxValues][kChunk];     // L of a chunk
  float weights[kMaxValues][kChunk];  // w
  uint64_t full[kMaxValues];          // q, k, v, L and w are there
  uint64_t values_free[kMaxValues];   // v, L and w have been used
  uint64_t stage_free[kMaxStages];    // q and k have been used
  uint64_t carried[kMaxSlots];        // S is there
  uint64_t used[kMaxSlots];
};
constexpr int kHeadRingBytes = (sizeof(HeadRing) + 1023) / 1024 * 1024;

// Without one of each there is no read.
template <typename T, int D>
constexpr int kLeastHeadReadBytes = kHeadRingBytes + HeadStage<T, D>::kBytes + HeadValues<T>::kBytes +
                                    HeadState<T, D>::kBytes + kOutBytes<T, D>;

template <typename T, int D, bool Reverse>
struct HeadBlock {
  using Stage = HeadStage<T, D>;
  using Values = HeadValues<T>;
  using State = HeadState<T, D>;

  const HeadPass& pass;
  const HeadRead& p;
  const HeadShape& shape;
  unsigned char* const shared;
  HeadRing& ring;
  const int warp;  // products of warpgroups bear no branch of single threads
  const bool alone;
  int walkers, group;  // heads that are walked, query heads of a memory
  int col, cols;       // of the values
  int query_head, head, state_head;
  int64_t number;  // of the sequence or segment
  Walk<Reverse> walk;
  bool publishes;

  __device__ HeadBlock(const HeadPass& pass, unsigned char* shared)
      : pass(pass),
        p(pass.read),
        shape(p.shape),
        shared(shared),
        ring(*reinterpret_cast<HeadRing*>(shared)),
        warp(warp_index()),
        alone(pass.cut.decay != nullptr) {}

  // False: there is nothing to do.
  __device__ bool start();
  __device__ void init_barriers() const;
  __device__ void load() const;        // head_loaders.cuh
  __device__ void publish() const;     // head_publishers.cuh
  __device__ void keep_state() const;  // head_keepers.cuh
  __device__ void read() const;        // head_readers.cuh

  __device__ Stage stage_at(int slot) const { return Stage(shared + kHeadRingBytes + slot * Stage::kBytes); }
  __device__ Values values_at(int place) const {
    return Values{reinterpret_cast<T*>(after_stages() + place * Values::kBytes)};
  }
  __device__ State state_at(int slot) const {
    return State{reinterpret_cast<T*>(after_values() + slot * State::kBytes)};
  }
  // A reader's rows on their way out.
  __device__ Values out_at(int reader) const {
    return Values{
        reinterpret_cast<T*>(after_values() + pass.slots * State::kBytes + reader * Values::kBytes)};
  }

 private:
  __device__ unsigned char* after_stages() const {
    return shared + kHeadRingBytes + pass.stages * Stage::kBytes;
  }
  __device__ unsigned char* after_values() const { return after_stages() + pass.values * Values::kBytes; }
};

template <typename T, int D, bool Reverse>
__device__ inline bool HeadBlock<T, D, Reverse>::start() {
  walkers = alone ? state_heads(p) : shape.query_heads, group = shape.query_heads / shape.heads;
  const unsigned slabs = (shape.V + kSlab - 1) / kSlab;
  unsigned job = blockIdx.x;
  col = static_cast<int>(job % slabs) * kSlab, cols = min(kSlab, shape.V - col);
  job /= slabs;
  query_head = static_cast<int>(job % walkers) * (shape.query_heads / walkers);
  number = job / walkers;
  head = query_head / group, state_head = Reverse ? query_head : head;
  if (!walk.find(shape.tokens, pass.cut.tokens, number, alone)) return false;
  // Query heads that share a state have the same one; the first publishes it.
  publishes = !alone && p.states != nullptr && (Reverse || query_head % group == 0);
  return true;
}

template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::init_barriers() const {
  const int users = 32 * (kKeepers<D> + (alone ? 0 : 4));  // of a chunk's q, k, v
  if (threadIdx.x < static_cast<unsigned>(pass.values)) {
    // Every loader for its copies, and one warp for the sums.
    init_barrier(&ring.full[threadIdx.x], 32 * (kLoaders + 1));
    init_barrier(&ring.values_free[threadIdx.x], users);
  }
  if (threadIdx.x < static_cast<unsigned>(pass.stages)) init_barrier(&ring.stage_free[threadIdx.x], users);
  if (threadIdx.x < static_cast<unsigned>(pass.slots)) {
    init_barrier(&ring.carried[threadIdx.x], 32 * kKeepers<D>);
    init_barrier(&ring.used[threadIdx.x], 32 * (4 + (publishes ? kPublishers : 0)));
  }
}

}  // namespace girih::kernels

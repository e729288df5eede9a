// A block of head_read_kernel: its part of the work, its shared memory, and its warp roles.
#pragma once

#include "gla/head_gates.cuh"
#include "gla/launch.h"
#include "gsa/gradients.cuh"
#include "gsa/walk.cuh"

namespace girih::kernels {

// Number of warps of each role, and registers of a thread of each role. The five warpgroups start with 96
// registers for a thread, 480 together. A state warp has 16 values and up to 128 keys of the state.
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
constexpr int kGatesAhead = 4;  // iterations between the prefetch of gates to L2 and their use
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

// Whether the output warps load q to registers. The rows of q are then loaded once for two products, and the
// stage is free after the scores, one and a half iterations before the values of the chunk are. The stores of
// o then cannot use the stage as a buffer and have their own (out_at).
template <int D>
constexpr bool kHoldsQueries = D <= 128;
template <typename T, int D>
constexpr int kOutBytes = kHoldsQueries<D> ? kReaders<D> / 4 * HeadValues<T>::kBytes : 0;

// The start of the shared memory. Behind it: stages, values, states, buffers for the stores of o.
struct HeadRing {
  float sums[kMaxValues][kChunk];     // L, the running sums of the gates of a chunk
  float weights[kMaxValues][kChunk];  // weights w of the values
  uint64_t full[kMaxValues];          // q, k, v, L and w are loaded
  uint64_t values_free[kMaxValues];   // v, L and w are free
  uint64_t stage_free[kMaxStages];    // q and k are free
  uint64_t carried[kMaxSlots];        // the rounded S is written
  uint64_t used[kMaxSlots];
};
constexpr int kHeadRingBytes = (sizeof(HeadRing) + 1023) / 1024 * 1024;

// The minimum of shared memory: one stage, one place for values and one state.
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
  const int warp;  // warp-uniform, as wgmma requires
  const bool alone;
  int walkers, group;  // heads that are scanned; query heads of a memory head
  int col, cols;       // columns of the values
  int query_head, head, state_head;
  int64_t number;  // index of the sequence or segment
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

  // Maps the block index to the block's work. Returns false if there is none.
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
  // The buffer of an output warpgroup for the stores of o.
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
  // Query heads with the same memory head compute the same state; the first stores it.
  publishes = !alone && p.states != nullptr && (Reverse || query_head % group == 0);
  return true;
}

template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::init_barriers() const {
  const int users = 32 * (kKeepers<D> + (alone ? 0 : 4));  // threads that consume q, k and v of a chunk
  if (threadIdx.x < static_cast<unsigned>(pass.values)) {
    // Arrivals: every loader for its copies, and one warp for the sums of gates.
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

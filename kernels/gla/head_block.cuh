// A block of head_read_kernel: its part of the work, its shared memory, and its warp roles.
#pragma once

#include "gla/head_gates.cuh"
#include "gla/kernels.h"
#include "gsa/gate_gradients.cuh"
#include "gsa/range.cuh"
#include "pipe/ring.h"
#include "pipe/roles.h"

namespace girih::kernels {

// Number of warps of each role, and registers of a thread of each role. The five warpgroups start with 96
// registers for a thread, 480 together. A state warp has 16 values and up to 128 keys of the state.
constexpr int kLoaders = 4;
constexpr int kStoreWarps = 4;
template <int D>
constexpr int kStateWarps = D <= 128 ? 4 : 8;
template <int D>
constexpr int kOutputWarps = 12 - kStateWarps<D>;
constexpr int kFirstStateWarp = kLoaders + kStoreWarps;
constexpr int kHeadReadThreads = 32 * 20;
constexpr int kLoaderRegisters = 64, kStoreRegisters = 32, kProductRegisters = 128;
static_assert(fit_registers(kHeadReadThreads,
                            {{1, kLoaderRegisters}, {1, kStoreRegisters}, {3, kProductRegisters}}));
constexpr int kGatePrefetchDistance = 4;  // iterations between the prefetch of gates to L2 and their use
constexpr int kMaxStages = 6, kMaxValueStages = 6;
constexpr int kMaxStateStages = 4;

template <typename T, int D>
using HeadState = BlockTile<T, D>;  // S^T, [64 values, D]

template <typename T, int D>
struct HeadStage {
  BlockTile<T, D> q, k;

  static constexpr int kBytes = 2 * BlockTile<T, D>::kBytes;

  __device__ explicit HeadStage(unsigned char* shared) { SharedAllocator{shared}(q)(k); }
};

template <typename T>
using HeadValues = BlockTile<T, kSlab>;

// Whether the output warps load q to registers. The rows of q are then loaded once for two products, and the
// stage is free after the scores, one and a half iterations before the values of the chunk are. The stores of
// o then cannot use the stage as a buffer and have their own (output_buffer_at).
template <int D>
constexpr bool kHasQueriesInRegisters = D <= 128;
template <typename T, int D>
constexpr int kOutputBufferBytes =
    kHasQueriesInRegisters<D> ? kOutputWarps<D> / 4 * HeadValues<T>::kBytes : 0;

// The start of the shared memory. Behind it: stages of q and k, stages of v, states, buffers for the stores
// of o.
struct HeadReadRings {
  float sums[kMaxValueStages][kChunk];          // L, the running sums of the gates of a chunk
  float weights[kMaxValueStages][kChunk];       // weights w of the values
  FullBarriers<kMaxValueStages> full;           // q, k, v, L and w are loaded
  EmptyBarriers<kMaxValueStages> values_empty;  // v, L and w are free
  EmptyBarriers<kMaxStages> stage_empty;        // q and k are free
  FullBarriers<kMaxStateStages> state_full;     // the rounded S is written
  EmptyBarriers<kMaxStateStages> state_empty;
};
constexpr int kHeadReadRingsBytes = (sizeof(HeadReadRings) + 1023) / 1024 * 1024;

// Shared memory of a block with these numbers of stages of q and k, of v, and of the state.
template <typename T, int D>
constexpr int head_read_bytes(int stages, int value_stages, int state_stages) {
  return kHeadReadRingsBytes + stages * HeadStage<T, D>::kBytes + value_stages * HeadValues<T>::kBytes +
         state_stages * HeadState<T, D>::kBytes + kOutputBufferBytes<T, D>;
}

template <typename T, int D, bool Reverse>
struct HeadBlock {
  using Stage = HeadStage<T, D>;
  using Values = HeadValues<T>;
  using State = HeadState<T, D>;

  const HeadReadParams& params;
  const HeadRead& p;
  const HeadShape& shape;
  unsigned char* const shared;
  HeadReadRings& ring;
  const int warp;  // warp-uniform, as wgmma requires
  const bool is_local_scan;
  int scanned_heads, group_size;  // heads that are scanned; query heads of a memory head
  int col, cols;                  // columns of the values
  int query_head, head, state_head;
  int64_t segment_index;  // among all segments, or sequences if these are not cut
  ChunkRange<Reverse> range;
  bool has_stores;

  __device__ HeadBlock(const HeadReadParams& params, unsigned char* shared)
      : params(params),
        p(params.problem),
        shape(p.shape),
        shared(shared),
        ring(*reinterpret_cast<HeadReadRings*>(shared)),
        warp(warp_index()),
        is_local_scan(params.segmentation.gate_sums != nullptr) {}

  // Maps the block index to the block's work. Returns false if there is none.
  __device__ bool init();
  __device__ void init_barriers() const;
  __device__ void run_loaders() const;       // head_loaders.cuh
  __device__ void run_store_warps() const;   // head_store_warps.cuh
  __device__ void run_state_warps() const;   // head_state_warps.cuh
  __device__ void run_output_warps() const;  // head_output_warps.cuh

  __device__ Stage stage_at(int index) const {
    return Stage(shared + kHeadReadRingsBytes + index * Stage::kBytes);
  }
  __device__ Values values_at(int index) const {
    return Values{reinterpret_cast<T*>(after_stages() + index * Values::kBytes)};
  }
  __device__ State state_at(int index) const {
    return State{reinterpret_cast<T*>(after_values() + index * State::kBytes)};
  }
  // The buffer of an output warpgroup for the stores of o.
  __device__ Values output_buffer_at(int output_warpgroup) const {
    return Values{reinterpret_cast<T*>(after_values() + params.state_stages * State::kBytes +
                                       output_warpgroup * Values::kBytes)};
  }

 private:
  __device__ unsigned char* after_stages() const {
    return shared + kHeadReadRingsBytes + params.stages * Stage::kBytes;
  }
  __device__ unsigned char* after_values() const {
    return after_stages() + params.value_stages * Values::kBytes;
  }
};

template <typename T, int D, bool Reverse>
__device__ inline bool HeadBlock<T, D, Reverse>::init() {
  scanned_heads = is_local_scan ? count_state_heads(p) : shape.query_heads,
  group_size = shape.query_heads / shape.heads;
  const unsigned slabs = (shape.V + kSlab - 1) / kSlab;
  unsigned block_index = blockIdx.x;
  col = static_cast<int>(block_index % slabs) * kSlab, cols = min(kSlab, shape.V - col);
  block_index /= slabs;
  query_head = static_cast<int>(block_index % scanned_heads) * (shape.query_heads / scanned_heads);
  segment_index = block_index / scanned_heads;
  head = query_head / group_size, state_head = Reverse ? query_head : head;
  if (!range.init(shape.tokens, params.segmentation.segment_tokens, segment_index, is_local_scan))
    return false;
  // Query heads with the same memory head compute the same state; the first stores it.
  has_stores = !is_local_scan && p.states != nullptr && (Reverse || query_head % group_size == 0);
  return true;
}

template <typename T, int D, bool Reverse>
__device__ inline void HeadBlock<T, D, Reverse>::init_barriers() const {
  const int consumer_threads =
      32 * (kStateWarps<D> + (is_local_scan ? 0 : 4));  // threads that consume q, k and v of a chunk
  // Arrivals: every loader for its copies, and one warp for the sums of gates.
  ring.full.init(32 * (kLoaders + 1), params.value_stages);
  ring.values_empty.init(consumer_threads, params.value_stages);
  ring.stage_empty.init(consumer_threads, params.stages);
  ring.state_full.init(32 * kStateWarps<D>, params.state_stages);
  ring.state_empty.init(32 * (4 + (has_stores ? kStoreWarps : 0)), params.state_stages);
}

}  // namespace girih::kernels

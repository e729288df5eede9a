// Shared memory, barriers and roles of a block of the scan.
#pragma once

#include "delta_product/state.cuh"
#include "delta_product/tokens.cuh"
#include "pipe/ring.h"

namespace girih::kernels::delta_product {

// Value of Rows (rows of a tile of tokens) for a launch that computes states without any output.
constexpr int kStateOnly = 0;

template <int D, int Rows>
struct ScanRoles {  // numbers of warps
  static constexpr int kStateGroupWarps = 4;
  // Without output two state warpgroups share the loads: one computes while the other waits for its products.
  static constexpr int kStateGroups = Rows == kStateOnly && D <= 128 ? 2 : 1;
  // At D = 256 the registers suffice for one output warpgroup only.
  static constexpr int kOutputGroupWarps = Rows == kStateOnly ? 0 : 4, kOutputGroups = Rows == kStateOnly ? 0
                                                                                       : D <= 128         ? 2
                                                                                                          : 1;
  static constexpr int kStoreWarps = Rows == kStateOnly ? 0 : 1;
  static constexpr int kFenceWarps = Rows == kStateOnly ? 0 : 1;
  static constexpr int kIdleWarps = kStateGroups == 2 ? 2 : 0;  // setmaxnreg applies to whole warpgroups
  static constexpr int kThreads = 32 * (kStateGroups * kStateGroupWarps + kOutputGroups * kOutputGroupWarps +
                                        kStoreWarps + kFenceWarps + kIdleWarps + kLoadWarps);
};

constexpr int kMaxStages = 4, kMaxStateStages = 3;

struct ScanBarriers {
  // Ring of keys and values.
  FullBarriers<kMaxStages> full, proxy_full;
  EmptyBarriers<kMaxStages> empty;
  // Ring of S and U.
  FullBarriers<kMaxStateStages> state_full, update_full;
  EmptyBarriers<kMaxStateStages> state_empty;
};
constexpr int kScanBarrierBytes = 256;
static_assert(sizeof(ScanBarriers) <= kScanBarrierBytes, "");

// Signals that an output warp has read S and U of a stage. Cluster: arrives at the barrier of block 0.
template <bool Cluster>
__device__ inline void arrive_state_empty(ScanBarriers& barriers, int stage) {
  Cluster ? barriers.state_empty.arrive_remote(stage, 0) : barriers.state_empty.arrive_warp(stage);
}

// HasB: b replaces beta k (kernels.h); a stage has a tile of b beside the keys.
template <typename T, int D, int Rows, bool HasB = false>
struct ScanStorage {
  static constexpr bool kHasB = HasB;
  using Keys = BlockTile<T, D>;
  static constexpr int kStateGroups = ScanRoles<D, Rows>::kStateGroups;

  using State = BlockTile<T, D, kScanColumns>;                 // S^T
  using Update = BlockTile<T, kDeltaChunkRows, kScanColumns>;  // U^T

  using Query = BlockTile<T, D, kTileRows>;  // rows of q of one output warp
  // Memory of an output warpgroup for tiles of kTokens tokens.
  static constexpr int kTokens = kDeltaChunkRows / 2;
  struct TransposedOutputStorage {
    using Query = BlockTile<T, D, kTokens>;
    using MaskedScores = BlockTile<T, 64>;  // P^T
    using Out = SharedTile<T, kTokens, kScanColumns>;
    static constexpr int kTokenFactorBytes = kTokens * 8;
    static constexpr int kBytes =
        (Query::kBytes + MaskedScores::kBytes + Out::kBytes + kTokenFactorBytes + 1023) / 1024 * 1024;

    Query q;
    MaskedScores masked_scores;
    Out out;
    float2* token_factors;  // {scale rho_t, L_t} of every token

    __device__ explicit TransposedOutputStorage(unsigned char* data)
        : q{reinterpret_cast<T*>(data)},
          masked_scores{reinterpret_cast<T*>(data + Query::kBytes)},
          out{reinterpret_cast<T*>(data + Query::kBytes + MaskedScores::kBytes)},
          token_factors(
              reinterpret_cast<float2*>(data + Query::kBytes + MaskedScores::kBytes + Out::kBytes)) {}
  };

  unsigned char* data;
  int stages, state_stages, output_groups;

  static constexpr int kBOffset = Stage<T, D>::kBytes + (kStateGroups - 1) * Values<T>::kBytes,
                       kStageBytes = kBOffset + (HasB ? Keys::kBytes : 0);
  static constexpr int kStateStageBytes = State::kBytes + Update::kBytes,
                       kOutputGroupBytes = Rows == kTokens ? TransposedOutputStorage::kBytes
                                                           : Rows / kTileRows * Query::kBytes;
  __host__ __device__ static constexpr int bytes(int stages, int state_stages, int output_groups) {
    return kScanBarrierBytes + stages * kStageBytes + state_stages * kStateStageBytes +
           output_groups * kOutputGroupBytes;
  }

  __device__ Stage<T, D> stage(int i) const { return {data + i * kStageBytes}; }
  // B, or without HasB K: the operand of the read Y.
  __device__ Keys b_or_k(int i) const {
    return {reinterpret_cast<T*>(stage(i).data + (HasB ? kBOffset : 0))};
  }
  __device__ Values<T> values(int i, int state_group) const {
    return state_group == 0 ? stage(i).v()
                            : Values<T>{reinterpret_cast<T*>(data + i * kStageBytes + Stage<T, D>::kBytes)};
  }
  // Rows of q of one output warp.
  __device__ Query query(int output_group, int warp) const {
    return {reinterpret_cast<T*>(output_group_data(output_group) + warp * Query::kBytes)};
  }
  __device__ TransposedOutputStorage transposed_output_storage(int i) const {
    return TransposedOutputStorage(output_group_data(i));
  }
  __device__ State state(int i) const { return {reinterpret_cast<T*>(state_stage(i))}; }
  __device__ Update update(int i) const { return {reinterpret_cast<T*>(state_stage(i) + State::kBytes)}; }
  __device__ ScanBarriers& barriers() const {
    return *reinterpret_cast<ScanBarriers*>(data + bytes(stages, state_stages, output_groups) -
                                            kScanBarrierBytes);
  }

 private:
  __device__ unsigned char* state_stage(int i) const {
    return data + stages * kStageBytes + i * kStateStageBytes;
  }
  __device__ unsigned char* output_group_data(int i) const {
    return state_stage(state_stages) + i * kOutputGroupBytes;
  }
};

}  // namespace girih::kernels::delta_product

// What a block of the scan has in shared memory.
#pragma once

#include "delta_product/chain.cuh"
#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

// Rows: of a chunk's tiles of tokens; 0: a block makes the state alone, without any output.
template <int Rows>
struct ScanRoles {  // warps
  static constexpr int kChain = 4;
  static constexpr int kScores = Rows == 0 ? 0 : 8;
  static constexpr int kStores = Rows == 0 ? 0 : 2;
  static constexpr int kThreads = 32 * (kChain + kScores + kStores + kLoaders);
};

// What one query head brings to a chunk, and what becomes of it.
template <typename T, int D, int Rows>
struct QueryStage {
  using Q = BlockTile<T, D, Rows>;
  using P = BlockTile<T, kDeltaRows, Rows>;
  static constexpr int kFactors = Q::kBytes + P::kBytes;
  static constexpr int kBytes = (kFactors + Rows * 4 + 1023) / 1024 * 1024;

  unsigned char* data;

  __device__ Q q() const { return {reinterpret_cast<T*>(data)}; }
  __device__ P p() const { return {reinterpret_cast<T*>(data + Q::kBytes)}; }
  // scale rho_t e^{L_t}
  __device__ float* factors() const { return reinterpret_cast<float*>(data + kFactors); }
};

constexpr int kMaxStages = 4, kStateSlots = 2, kOutputSlots = 2;

struct ScanBarriers {
  uint64_t full[kMaxStages], empty[kMaxStages];                                  // stages
  uint64_t query_full[kMaxStages], scored[kMaxStages], query_empty[kMaxStages];  // of the query heads
  uint64_t state[kStateSlots], state_stored[kStateSlots];
  uint64_t output[kOutputSlots], output_stored[kOutputSlots];
};
constexpr int kScanBarrierBytes = 256;
static_assert(sizeof(ScanBarriers) <= kScanBarrierBytes, "");

template <typename T, int D, int Rows>
struct ScanSpace {
  using Query = QueryStage<T, D, Rows>;
  using StateSlot = PaddedTile<T, kScanColumns, D>;
  using OutputSlot = PaddedTile<T, Rows, kScanColumns>;

  unsigned char* data;
  int stages, slots;

  static constexpr int kStage = Stage<T, D>::kBytes + (Rows == 0 ? 0 : Query::kBytes);
  static constexpr int kOutputs = Rows == 0 ? 0 : kOutputSlots * OutputSlot::kBytes;
  __host__ __device__ static constexpr int bytes(int stages, int slots) {
    return kScanBarrierBytes + stages * kStage + kOutputs + slots * StateSlot::kBytes;
  }

  __device__ Stage<T, D> stage(int i) const { return {data + i * Stage<T, D>::kBytes}; }
  __device__ Query query(int i) const { return {data + stages * Stage<T, D>::kBytes + i * Query::kBytes}; }
  __device__ OutputSlot output(int i) const {
    return {reinterpret_cast<T*>(data + stages * kStage + i * OutputSlot::kBytes)};
  }
  __device__ StateSlot state(int i) const {
    return {reinterpret_cast<T*>(data + stages * kStage + kOutputs + i * StateSlot::kBytes)};
  }
  __device__ ScanBarriers& barriers() const {
    return *reinterpret_cast<ScanBarriers*>(data + bytes(stages, slots) - kScanBarrierBytes);
  }
};

}  // namespace girih::kernels::delta_product

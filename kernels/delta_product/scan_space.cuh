// What a block of the scan has in shared memory.
#pragma once

#include "delta_product/chain.cuh"
#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

// Rows: of a chunk's tiles of tokens; 0: a block makes the state alone, without any output.
template <int Rows>
struct ScanRoles {  // warps
  static constexpr int kChain = 4;
  static constexpr int kReaders = Rows == 0 ? 0 : 4;
  static constexpr int kScores = Rows == 0 ? 0 : 5;
  static constexpr int kStores = Rows == 0 ? 0 : 1;
  static constexpr int kThreads = 32 * (kChain + kReaders + kScores + kStores + kLoaders);
};

// What one query head brings to a chunk, and what becomes of it.
template <typename T, int D, int Rows>
struct QueryStage {
  using Q = BlockTile<T, D, Rows>;
  using P = BlockTile<T, kDeltaRows, Rows>;
  using O = SharedTile<T, Rows, kScanColumns>;
  static constexpr int kFactors = Q::kBytes + P::kBytes;
  static constexpr int kBytes = (kFactors + Rows * 4 + 1023) / 1024 * 1024;

  unsigned char* data;

  __device__ Q q() const { return {reinterpret_cast<T*>(data)}; }
  __device__ P p() const { return {reinterpret_cast<T*>(data + Q::kBytes)}; }
  // The output on its way out, where q was.
  __device__ O o() const { return {reinterpret_cast<T*>(data)}; }
  // scale rho_t e^{L_t}
  __device__ float* factors() const { return reinterpret_cast<float*>(data + kFactors); }
};

constexpr int kMaxStages = 4, kMaxSlots = 2;

struct ScanBarriers {
  uint64_t full[kMaxStages], ready[kMaxStages], empty[kMaxStages];               // stages
  uint64_t query_full[kMaxStages], scored[kMaxStages], query_empty[kMaxStages];  // of the query heads
  uint64_t state[kMaxSlots], update[kMaxSlots], read[kMaxSlots];                 // S and U of a chunk
};
constexpr int kScanBarrierBytes = 256;
static_assert(sizeof(ScanBarriers) <= kScanBarrierBytes, "");

template <typename T, int D, int Rows>
struct ScanSpace {
  using Query = QueryStage<T, D, Rows>;
  using State = PaddedTile<T, kScanColumns, D>;
  using Update = PaddedTile<T, kScanColumns, kDeltaRows>;

  unsigned char* data;
  int stages, queries, slots;

  static constexpr int kSlotBytes = State::kBytes + Update::kBytes;
  __host__ __device__ static constexpr int bytes(int stages, int queries, int slots) {
    return kScanBarrierBytes + stages * Stage<T, D>::kBytes +
           (Rows == 0 ? 0 : queries * Query::kBytes + slots * kSlotBytes);
  }

  __device__ Stage<T, D> stage(int i) const { return {data + i * Stage<T, D>::kBytes}; }
  __device__ Query query(int i) const { return {after_stages() + i * Query::kBytes}; }
  __device__ State state(int i) const { return {reinterpret_cast<T*>(slot(i))}; }
  __device__ Update update(int i) const { return {reinterpret_cast<T*>(slot(i) + State::kBytes)}; }
  __device__ ScanBarriers& barriers() const {
    return *reinterpret_cast<ScanBarriers*>(data + bytes(stages, queries, slots) - kScanBarrierBytes);
  }

 private:
  __device__ unsigned char* after_stages() const { return data + stages * Stage<T, D>::kBytes; }
  __device__ unsigned char* slot(int i) const {
    return after_stages() + queries * Query::kBytes + i * kSlotBytes;
  }
};

}  // namespace girih::kernels::delta_product

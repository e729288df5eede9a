// What a block of the scan has in shared memory.
#pragma once

#include "delta_product/chain.cuh"
#include "delta_product/tokens.cuh"

namespace girih::kernels::delta_product {

// Rows: of a chunk's tiles of tokens; 0: a block makes the state alone, without any output.
template <int D, int Rows>
struct ScanRoles {  // warps
  static constexpr int kChain = 4;
  // Of more than D = 128 there are registers for one reader alone.
  static constexpr int kReader = Rows == 0 ? 0 : 4, kReaders = Rows == 0 ? 0 : D <= 128 ? 2 : 1;
  static constexpr int kStores = Rows == 0 ? 0 : 1;
  static constexpr int kFences = Rows == 0 ? 0 : 1;
  static constexpr int kThreads = 32 * (kChain + kReaders * kReader + kStores + kFences + kLoaders);
};

constexpr int kMaxStages = 4, kMaxSlots = 2;

struct ScanBarriers {
  uint64_t full[kMaxStages], ready[kMaxStages], empty[kMaxStages];  // stages
  uint64_t state[kMaxSlots], update[kMaxSlots], read[kMaxSlots];    // S and U of a chunk
};
constexpr int kScanBarrierBytes = 256;
static_assert(sizeof(ScanBarriers) <= kScanBarrierBytes, "");

template <typename T, int D, int Rows>
struct ScanSpace {
  using Query = BlockTile<T, D, kTileRows>;               // a reader's warp's rows of q
  using State = BlockTile<T, D, kScanColumns>;            // S^T
  using Update = BlockTile<T, kDeltaRows, kScanColumns>;  // U^T

  unsigned char* data;
  int stages, slots;

  static constexpr int kWarpsOfRows = Rows / kTileRows;
  static constexpr int kSlotBytes = State::kBytes + Update::kBytes,
                       kQueryBytes = ScanRoles<D, Rows>::kReaders * kWarpsOfRows * Query::kBytes;
  __host__ __device__ static constexpr int bytes(int stages, int slots) {
    return kScanBarrierBytes + stages * Stage<T, D>::kBytes +
           (Rows == 0 ? 0 : kQueryBytes + slots * kSlotBytes);
  }

  __device__ Stage<T, D> stage(int i) const { return {data + i * Stage<T, D>::kBytes}; }
  __device__ Query query(int i) const { return {reinterpret_cast<T*>(after_stages() + i * Query::kBytes)}; }
  __device__ State state(int i) const { return {reinterpret_cast<T*>(slot(i))}; }
  __device__ Update update(int i) const { return {reinterpret_cast<T*>(slot(i) + State::kBytes)}; }
  __device__ ScanBarriers& barriers() const {
    return *reinterpret_cast<ScanBarriers*>(data + bytes(stages, slots) - kScanBarrierBytes);
  }

 private:
  __device__ unsigned char* after_stages() const { return data + stages * Stage<T, D>::kBytes; }
  __device__ unsigned char* slot(int i) const { return after_stages() + kQueryBytes + i * kSlotBytes; }
};

}  // namespace girih::kernels::delta_product

// Shared memory, barriers and roles of a block of the scan.
#pragma once

#include "delta_product/state.cuh"
#include "delta_product/tokens.cuh"
#include "tile/cluster.h"

namespace girih::kernels::delta_product {

// Value of Rows (rows of a tile of tokens) for a launch that computes states without any output.
constexpr int kAlone = 0;

template <int D, int Rows>
struct ScanRoles {  // numbers of warps
  static constexpr int kChain = 4;
  // Without output two state warpgroups share the loads: one computes while the other waits for its products.
  static constexpr int kChains = Rows == kAlone && D <= 128 ? 2 : 1;
  // At D = 256 the registers suffice for one output warpgroup only.
  static constexpr int kReader = Rows == kAlone ? 0 : 4, kReaders = Rows == kAlone ? 0 : D <= 128 ? 2 : 1;
  static constexpr int kStores = Rows == kAlone ? 0 : 1;
  static constexpr int kFences = Rows == kAlone ? 0 : 1;
  static constexpr int kIdle = kChains == 2 ? 2 : 0;  // setmaxnreg applies to whole warpgroups
  static constexpr int kThreads =
      32 * (kChains * kChain + kReaders * kReader + kStores + kFences + kIdle + kLoaders);
};

constexpr int kMaxStages = 4, kMaxSlots = 3;

struct ScanBarriers {
  uint64_t full[kMaxStages], ready[kMaxStages], empty[kMaxStages];  // ring of keys and values
  uint64_t state[kMaxSlots], update[kMaxSlots], read[kMaxSlots];    // ring of S and U
};
constexpr int kScanBarrierBytes = 256;
static_assert(sizeof(ScanBarriers) <= kScanBarrierBytes, "");

// Signals that an output warp has read S and U of a stage. Apart: the barrier of block 0 of the cluster.
template <bool Apart>
__device__ inline void leave_slot(uint64_t& barrier) {
  Apart ? arrive_far(&barrier, 0) : arrive_once(&barrier);
}

// ReadKeys: b replaces beta k in reads; a stage has a tile of b beside the keys.
template <typename T, int D, int Rows, bool ReadKeys = false>
struct ScanSpace {
  static constexpr bool kReadKeys = ReadKeys;
  using Keys = BlockTile<T, D>;
  static constexpr int kChains = ScanRoles<D, Rows>::kChains;

  using State = BlockTile<T, D, kScanColumns>;            // S^T
  using Update = BlockTile<T, kDeltaRows, kScanColumns>;  // U^T

  using Query = BlockTile<T, D, kTileRows>;  // rows of q of one output warp
  // Memory of an output warpgroup for tiles of 32 tokens.
  static constexpr int kTokens = kDeltaRows / 2;
  struct HalfReader {
    using Query = BlockTile<T, D, kTokens>;
    using Near = BlockTile<T, 64>;  // P^T
    using Out = SharedTile<T, kTokens, kScanColumns>;
    static constexpr int kTokenBytes = kTokens * 8;
    static constexpr int kBytes =
        (Query::kBytes + Near::kBytes + Out::kBytes + kTokenBytes + 1023) / 1024 * 1024;

    Query q;
    Near near;
    Out out;
    float2* tokens;  // {scale rho_t, L_t} of every token

    __device__ explicit HalfReader(unsigned char* data)
        : q{reinterpret_cast<T*>(data)},
          near{reinterpret_cast<T*>(data + Query::kBytes)},
          out{reinterpret_cast<T*>(data + Query::kBytes + Near::kBytes)},
          tokens(reinterpret_cast<float2*>(data + Query::kBytes + Near::kBytes + Out::kBytes)) {}
  };

  unsigned char* data;
  int stages, slots, readers;

  static constexpr int kReadKeysAt = Stage<T, D>::kBytes + (kChains - 1) * Values<T>::kBytes,
                       kStageBytes = kReadKeysAt + (ReadKeys ? Keys::kBytes : 0);
  static constexpr int kSlotBytes = State::kBytes + Update::kBytes,
                       kReaderBytes = Rows == kTokens ? HalfReader::kBytes : Rows / kTileRows * Query::kBytes;
  __host__ __device__ static constexpr int bytes(int stages, int slots, int readers) {
    return kScanBarrierBytes + stages * kStageBytes + slots * kSlotBytes + readers * kReaderBytes;
  }

  __device__ Stage<T, D> stage(int i) const { return {data + i * kStageBytes}; }
  __device__ Keys read_keys(int i) const {
    return {reinterpret_cast<T*>(stage(i).data + (ReadKeys ? kReadKeysAt : 0))};
  }
  __device__ Values<T> values(int i, int chain) const {
    return chain == 0 ? stage(i).v()
                      : Values<T>{reinterpret_cast<T*>(data + i * kStageBytes + Stage<T, D>::kBytes)};
  }
  // Rows of q of one output warp.
  __device__ Query query(int reader, int warp) const {
    return {reinterpret_cast<T*>(of_reader(reader) + warp * Query::kBytes)};
  }
  __device__ HalfReader half_reader(int i) const { return HalfReader(of_reader(i)); }
  __device__ State state(int i) const { return {reinterpret_cast<T*>(slot(i))}; }
  __device__ Update update(int i) const { return {reinterpret_cast<T*>(slot(i) + State::kBytes)}; }
  __device__ ScanBarriers& barriers() const {
    return *reinterpret_cast<ScanBarriers*>(data + bytes(stages, slots, readers) - kScanBarrierBytes);
  }

 private:
  __device__ unsigned char* slot(int i) const { return data + stages * kStageBytes + i * kSlotBytes; }
  __device__ unsigned char* of_reader(int i) const { return slot(slots) + i * kReaderBytes; }
};

}  // namespace girih::kernels::delta_product

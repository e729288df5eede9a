// What a block of the scan has in shared memory.
#pragma once

#include "delta_product/state.cuh"
#include "delta_product/tokens.cuh"
#include "tile/cluster.h"

namespace girih::kernels::delta_product {

// In place of the rows of a chunk's tiles of tokens: a block makes the state alone, without any output.
constexpr int kAlone = 0;

template <int D, int Rows>
struct ScanRoles {  // warps
  static constexpr int kChain = 4;
  // Alone, two chains share what is loaded: while one waits for its products the other has its turn.
  static constexpr int kChains = Rows == kAlone && D <= 128 ? 2 : 1;
  // Of more than D = 128 there are registers for one reader alone.
  static constexpr int kReader = Rows == kAlone ? 0 : 4, kReaders = Rows == kAlone ? 0 : D <= 128 ? 2 : 1;
  static constexpr int kStores = Rows == kAlone ? 0 : 1;
  static constexpr int kFences = Rows == kAlone ? 0 : 1;
  static constexpr int kIdle = kChains == 2 ? 2 : 0;  // registers change owners by whole warpgroups
  static constexpr int kThreads =
      32 * (kChains * kChain + kReaders * kReader + kStores + kFences + kIdle + kLoaders);
};

constexpr int kMaxStages = 4, kMaxSlots = 3;

struct ScanBarriers {
  uint64_t full[kMaxStages], ready[kMaxStages], empty[kMaxStages];  // stages
  uint64_t state[kMaxSlots], update[kMaxSlots], read[kMaxSlots];    // S and U of a chunk
};
constexpr int kScanBarrierBytes = 256;
static_assert(sizeof(ScanBarriers) <= kScanBarrierBytes, "");

// A reader has read a slot. Apart: it is the first block's.
template <bool Apart>
__device__ inline void leave_slot(uint64_t& barrier) {
  Apart ? arrive_far(&barrier, 0) : arrive_once(&barrier);
}

// ReadKeys: what reads are not the keys that write times beta, but b, which a stage has beside.
template <typename T, int D, int Rows, bool ReadKeys = false>
struct ScanSpace {
  static constexpr bool kReadKeys = ReadKeys;
  using Keys = BlockTile<T, D>;
  static constexpr int kChains = ScanRoles<D, Rows>::kChains;

  using State = BlockTile<T, D, kScanColumns>;            // S^T
  using Update = BlockTile<T, kDeltaRows, kScanColumns>;  // U^T

  using Query = BlockTile<T, D, kTileRows>;  // a reader's warp's rows of q
  // What a reader of half as many tokens has of its own.
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
    float2* tokens;  // of every token scale rho_t, L_t

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
  // Of a reader's warp.
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

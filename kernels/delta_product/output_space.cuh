// What a block of the scan that makes its output in the chain has in shared memory, and its warps.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

// Chains: one, or two, of four warps with 64 columns of V each.
template <int Chains>
struct OutputRoles {  // warps
  static constexpr int kChain = 4 * Chains, kMaker = 4, kMakers = Chains == 1 ? 2 : 1;
  static constexpr int kThreads = 32 * (kChain + kMakers * kMaker + 2 + kLoaders);
  static constexpr int kChainRegisters = Chains == 1 ? 240 : 208, kMakerRegisters = Chains == 1 ? 96 : 64,
                       kOtherRegisters = Chains == 1 ? 80 : 32;
  static_assert(Chains * kChainRegisters + kMakers * kMakerRegisters + kOtherRegisters <=
                registers_of(kThreads));
};

constexpr int kMaxPlaces = 4;

// The lane's number. Beside two chains there are few registers: what follows from it is worked out every
// time.
template <int Chains>
__device__ inline int lane_here() {
  return Chains == 1 ? lane() : worked_out_here(lane());
}

struct OutputBarriers {
  uint64_t full[kMaxStages], empty[kMaxStages];                                          // stages
  uint64_t queried[kMaxPlaces], made[kMaxPlaces], used[kMaxPlaces], output[kMaxPlaces];  // places
  uint64_t state[kMaxSlots], read[kMaxSlots];                                            // S of a chunk
};

// Rows: of a tile of tokens.
template <typename T, int D, int Rows, int Chains>
struct OutputSpace {
  static constexpr int kChains = Chains;
  static constexpr int kColumns = Chains * kScanColumns;

  using State = BlockTile<T, D, kColumns>;
  using Keys = Stage<T, D, false>;
  using V = BlockTile<T, kColumns>;
  // A place: a chunk's queries, later its output, and P^T beside them.
  using Query = BlockTile<T, D, Rows>;
  using Output = BlockTile<T, kColumns, Rows>;  // where the queries were, once they are used
  using Near = BlockTile<T, 64>;                // P^T
  static_assert(Output::kBytes <= Query::kBytes);

  static constexpr int kStageBytes = Keys::kBytes + V::kBytes, kSlotBytes = State::kBytes;
  static constexpr int kPlaceBytes = Query::kBytes + Near::kBytes;
  // In a stage, beside the vectors.
  static constexpr int kTokens = Keys::kPrepared + kDeltaLost;
  static_assert(kTokens + Rows * 8 <= Keys::kBytes);
  static constexpr int kBarrierBytes = 256;
  static_assert(sizeof(OutputBarriers) <= kBarrierBytes);

  unsigned char* data;
  int stages, places, slots;

  __host__ __device__ static constexpr int bytes(int stages, int places, int slots) {
    return kBarrierBytes + stages * kStageBytes + places * (kPlaceBytes + kDeltaRows * 4) +
           slots * kSlotBytes;
  }

  __device__ Keys stage(int i) const { return {data + i * kStageBytes}; }
  __device__ V values(int i) const { return {reinterpret_cast<T*>(data + i * kStageBytes + Keys::kBytes)}; }
  __device__ Query query(int i) const { return {reinterpret_cast<T*>(place(i))}; }
  __device__ Output output(int i) const { return {reinterpret_cast<T*>(place(i))}; }
  __device__ Near near(int i) const { return {reinterpret_cast<T*>(place(i) + Query::kBytes)}; }
  __device__ State state(int i) const { return {reinterpret_cast<T*>(slot(i))}; }
  // Of stage i's tokens scale rho_t and L_t; of a mild chunk scale rho_t e^{L_t - L_C}.
  __device__ float2* tokens(int i) const {
    return reinterpret_cast<float2*>(data + i * kStageBytes + kTokens);
  }
  // Of place i's tokens scale rho_t e^{L_t}.
  __device__ float* far(int i) const {
    return reinterpret_cast<float*>(slot(slots) + kBarrierBytes) + i * kDeltaRows;
  }
  __device__ OutputBarriers& barriers() const { return *reinterpret_cast<OutputBarriers*>(slot(slots)); }

 private:
  __device__ unsigned char* place(int i) const { return data + stages * kStageBytes + i * kPlaceBytes; }
  __device__ unsigned char* slot(int i) const { return place(places) + i * kSlotBytes; }
};

// Whether a chunk's X makes w U instead of U, and P is as much larger, P_tj / w_j: then one rounding serves
// the update and the output, and P has no power of every pair (1 x 32768 tokens, 8 heads of 128, gated: 249
// us instead of 253). Of unit keys P / w is 2^64 times as large at most, and w U as small: bf16 has the
// range.
template <typename T>
__device__ inline bool is_mild(bool keeps, float log_end) {
  return std::is_same_v<T, __nv_bfloat16> && !keeps && log_end > -64.f;
}

}  // namespace girih::kernels::delta_product

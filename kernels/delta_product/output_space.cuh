// Shared memory, barriers and roles of scan_output.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

// Chains: 1 or 2 state warpgroups with 64 columns of V each.
template <int Chains>
struct OutputRoles {  // numbers of warps
  static constexpr int kChain = 4 * Chains, kMaker = 4, kMakers = Chains == 1 ? 2 : 1;
  static constexpr int kThreads = 32 * (kChain + kMakers * kMaker + 2 + kLoaders);
  static constexpr int kChainRegisters = Chains == 1 ? 240 : 208, kMakerRegisters = Chains == 1 ? 96 : 64,
                       kOtherRegisters = Chains == 1 ? 80 : 32;
  static_assert(Chains * kChainRegisters + kMakers * kMakerRegisters + kOtherRegisters <=
                registers_of(kThreads));
};

constexpr int kMaxPlaces = 4;

// The lane index. With two state warpgroups registers are scarce, so values derived from it are recomputed at
// each use.
template <int Chains>
__device__ inline int lane_here() {
  return Chains == 1 ? lane() : worked_out_here(lane());
}

struct OutputBarriers {
  uint64_t full[kMaxStages], empty[kMaxStages];  // ring of keys and values
  uint64_t queried[kMaxPlaces], made[kMaxPlaces], used[kMaxPlaces], output[kMaxPlaces];  // queries, outputs
  uint64_t state[kMaxSlots], read[kMaxSlots];                                            // ring of S
};

// Rows: rows of a tile of tokens.
template <typename T, int D, int Rows, int Chains>
struct OutputSpace {
  static constexpr int kChains = Chains;
  static constexpr int kColumns = Chains * kScanColumns;

  using State = BlockTile<T, D, kColumns>;
  using Keys = Stage<T, D, false>;
  using V = BlockTile<T, kColumns>;
  // A stage of queries holds the queries of a chunk, later its output, and P^T.
  using Query = BlockTile<T, D, Rows>;
  using Output = BlockTile<T, kColumns, Rows>;  // in the memory of the queries after their last use
  using Near = BlockTile<T, 64>;                // P^T
  static_assert(Output::kBytes <= Query::kBytes);

  static constexpr int kStageBytes = Keys::kBytes + V::kBytes, kSlotBytes = State::kBytes;
  static constexpr int kPlaceBytes = Query::kBytes + Near::kBytes;
  // Offset of the factors of tokens in a stage, after the row factors.
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
  // {scale rho_t, L_t} of the tokens of stage i; if is_mild() the first is scale rho_t e^{L_t - L_C}.
  __device__ float2* tokens(int i) const {
    return reinterpret_cast<float2*>(data + i * kStageBytes + kTokens);
  }
  // scale rho_t e^{L_t} of the tokens of place i.
  __device__ float* far(int i) const {
    return reinterpret_cast<float*>(slot(slots) + kBarrierBytes) + i * kDeltaRows;
  }
  __device__ OutputBarriers& barriers() const { return *reinterpret_cast<OutputBarriers*>(slot(slots)); }

 private:
  __device__ unsigned char* place(int i) const { return data + stages * kStageBytes + i * kPlaceBytes; }
  __device__ unsigned char* slot(int i) const { return place(places) + i * kSlotBytes; }
};

// If true, the factor w moves from U to X and P: X yields w U instead of U, and P_tj is divided by w_j. Then
// one rounding of w U serves the update and the output, and P needs no exponential of every pair (1 x 32768
// tokens, 8 heads of 128, with gates: 249 us instead of 253). For unit keys P / w is at most 2^64 times as
// large as P, which bf16 can represent.
template <typename T>
__device__ inline bool is_mild(bool keeps, float log_end) {
  return std::is_same_v<T, __nv_bfloat16> && !keeps && log_end > -64.f;
}

}  // namespace girih::kernels::delta_product

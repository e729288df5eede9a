// Shared memory, barriers and roles of scan_fused.
#pragma once

#include "delta_product/scan_storage.cuh"
#include "pipe/ring.h"

namespace girih::kernels::delta_product {

// StateGroups: 1 or 2 state warpgroups with 64 columns of V each.
template <int StateGroups>
struct FusedRoles {  // numbers of warps
  static constexpr int kStateWarps = 4 * StateGroups, kIntraChunkGroupWarps = 4,
                       kIntraChunkGroups = StateGroups == 1 ? 2 : 1;
  static constexpr int kThreads =
      32 * (kStateWarps + kIntraChunkGroups * kIntraChunkGroupWarps + 2 + kLoadWarps);
  static constexpr int kStateRegisters = StateGroups == 1 ? 240 : 208,
                       kIntraChunkRegisters = StateGroups == 1 ? 96 : 64,
                       kOtherRegisters = StateGroups == 1 ? 80 : 32;
  static_assert(fit_registers(kThreads, {{StateGroups, kStateRegisters},
                                         {kIntraChunkGroups, kIntraChunkRegisters},
                                         {1, kOtherRegisters}}));
};

constexpr int kMaxQueryStages = 4;

// The lane index. With two state warpgroups registers are scarce, so values derived from it are recomputed at
// each use.
template <int StateGroups>
__device__ inline int recomputed_lane() {
  return StateGroups == 1 ? lane() : opaque_value(lane());
}

struct FusedBarriers {
  // Ring of keys and values.
  FullBarriers<kMaxStages> full;
  EmptyBarriers<kMaxStages> empty;
  // Ring of queries; the outputs replace the queries in a stage.
  FullBarriers<kMaxQueryStages> query_full, scores_full;
  EmptyBarriers<kMaxQueryStages> query_empty;
  FullBarriers<kMaxQueryStages> output_full;
  // Ring of S.
  FullBarriers<kMaxStateStages> state_full;
  EmptyBarriers<kMaxStateStages> state_empty;
};

// Rows: rows of a tile of tokens.
template <typename T, int D, int Rows, int StateGroups>
struct FusedStorage {
  static constexpr int kStateGroups = StateGroups;
  static constexpr int kBlockColumns = StateGroups * kScanColumns;

  using State = BlockTile<T, D, kBlockColumns>;
  using KeyStage = Stage<T, D, false>;
  using V = BlockTile<T, kBlockColumns>;
  // A stage of queries holds the queries of a chunk, later its output, and P^T.
  using Query = BlockTile<T, D, Rows>;
  using Output = BlockTile<T, kBlockColumns, Rows>;  // in the memory of the queries after their last use
  using MaskedScores = BlockTile<T, 64>;             // P^T
  static_assert(Output::kBytes <= Query::kBytes);

  static constexpr int kStageBytes = KeyStage::kBytes + V::kBytes, kStateStageBytes = State::kBytes;
  static constexpr int kQueryStageBytes = Query::kBytes + MaskedScores::kBytes;
  // Offset of the factors of tokens in a stage, after the flags.
  static constexpr int kTokenFactorsOffset = KeyStage::kPreparedOffset + kDeltaInverseLoOffset;
  static_assert(kTokenFactorsOffset + Rows * 8 <= KeyStage::kBytes);
  static constexpr int kBarrierBytes = 256;
  static_assert(sizeof(FusedBarriers) <= kBarrierBytes);

  unsigned char* data;
  int stages, query_stages, state_stages;

  __host__ __device__ static constexpr int bytes(int stages, int query_stages, int state_stages) {
    return kBarrierBytes + stages * kStageBytes + query_stages * (kQueryStageBytes + kDeltaChunkRows * 4) +
           state_stages * kStateStageBytes;
  }

  __device__ KeyStage stage(int i) const { return {data + i * kStageBytes}; }
  __device__ V values(int i) const {
    return {reinterpret_cast<T*>(data + i * kStageBytes + KeyStage::kBytes)};
  }
  __device__ Query query(int i) const { return {reinterpret_cast<T*>(query_stage(i))}; }
  __device__ Output output(int i) const { return {reinterpret_cast<T*>(query_stage(i))}; }
  __device__ MaskedScores masked_scores(int i) const {
    return {reinterpret_cast<T*>(query_stage(i) + Query::kBytes)};
  }
  __device__ State state(int i) const { return {reinterpret_cast<T*>(state_stage(i))}; }
  // {scale rho_t, L_t} of the tokens of stage i, or with can_weigh_inverse() {scale rho_t e^{L_t - L_C}, 0}.
  __device__ float2* token_factors(int i) const {
    return reinterpret_cast<float2*>(data + i * kStageBytes + kTokenFactorsOffset);
  }
  // r_t = scale rho_t e^{L_t} of the tokens of query stage i.
  __device__ float* query_factors(int i) const {
    return reinterpret_cast<float*>(state_stage(state_stages) + kBarrierBytes) + i * kDeltaChunkRows;
  }
  __device__ FusedBarriers& barriers() const {
    return *reinterpret_cast<FusedBarriers*>(state_stage(state_stages));
  }

 private:
  __device__ unsigned char* query_stage(int i) const {
    return data + stages * kStageBytes + i * kQueryStageBytes;
  }
  __device__ unsigned char* state_stage(int i) const {
    return query_stage(query_stages) + i * kStateStageBytes;
  }
};

// If true, the factor w moves from U to X and P: X yields w U instead of U, and P_tj is divided by w_j. Then
// one rounding of w U serves the update and the output, and P needs no exponential of every pair (1 x 32768
// tokens, 8 heads of 128, with gates: 249 us instead of 253). For unit keys P / w is at most 2^64 times as
// large as P, which bf16 can represent.
template <typename T>
__device__ inline bool can_weigh_inverse(bool has_inverse_lo, float log_end) {
  return std::is_same_v<T, __nv_bfloat16> && !has_inverse_lo && log_end > -64.f;
}

}  // namespace girih::kernels::delta_product

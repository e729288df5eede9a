// Shared memory, barriers and roles of a block of reverse.
#pragma once

#include "delta_product/state.cuh"
#include "pipe/ring.h"

namespace girih::kernels::delta_product {

// Numbers of warps.
constexpr int kReverseStateWarps = 4, kReverseIntraChunkWarps = 4, kReverseStoreWarps = 2;
constexpr int kReverseThreads =
    32 * (kReverseStateWarps + kReverseIntraChunkWarps + kReverseStoreWarps + kLoadWarps);

// q, do and the factors of the tokens of one query head and chunk: `Rows` tokens, 64, or 32 if n > 1.
template <typename T, int D, int Rows>
struct QueryStage {
  using Q = BlockTile<T, D, Rows>;
  using DOut = BlockTile<T, kScanColumns, Rows>;
  static constexpr int kBytes = Q::kBytes + DOut::kBytes, kFactorBytes = Rows * 12;

  unsigned char *data, *factors;

  __device__ Q q() const { return {reinterpret_cast<T*>(data)}; }
  __device__ DOut dout() const { return {reinterpret_cast<T*>(data + Q::kBytes)}; }
  // Stored by the intra-chunk warps for every token: {scale rho_t, L_t log2(e)}, the factors of P, and r_t =
  // scale rho_t e^{L_t}, the factor of a query that reads S.
  __device__ float2* token_factors() const { return reinterpret_cast<float2*>(factors); }
  __device__ float* query_factors() const { return reinterpret_cast<float*>(factors + Rows * 8); }
};

constexpr int kReverseStages = 4, kReverseStateStages = 2, kReverseDuLocalStages = 2;

struct ReverseBarriers {
  // Ring of keys.
  FullBarriers<kReverseStages> full;
  EmptyBarriers<kReverseStages> empty;
  // Ring of du_local, the term P^T dO of dU.
  FullBarriers<kReverseDuLocalStages> du_local_full;
  EmptyBarriers<kReverseDuLocalStages> du_local_empty;
  // Ring of query heads. query_full: q and do are loaded. query_factors_full: token_factors() and
  // query_factors() are stored too.
  FullBarriers<kReverseStages> query_full, query_factors_full;
  EmptyBarriers<kReverseStages> query_empty;
  // dS, and G or dv.
  FullBarriers<kReverseStateStages> state_full;
  EmptyBarriers<kReverseStateStages> state_empty;
  FullBarriers<kReverseStateStages> dz_full;
  EmptyBarriers<kReverseStateStages> dz_empty;
};
constexpr int kReverseBarrierBytes = 384;  // a multiple of 128
static_assert(sizeof(ReverseBarriers) <= kReverseBarrierBytes, "");

// Shared memory, in this order:
//     du_local           [kReverseDuLocalStages]
//     K, X and factors   [stages]            with HasB (see ScanStorage) also B
//     q and do           [stages]
//     factors of tokens  [stages]
//     dS and dz          [state_stages]
//     barriers
template <typename T, int D, int Rows, bool HasB = false>
struct ReverseStorage {
  using KeyStage = Stage<T, D, false>;
  using DuTile = SharedTile<T, kDeltaChunkRows, kScanColumns>;
  using Query = QueryStage<T, D, Rows>;
  using StateTile = PaddedTile<T, kScanColumns, D>;
  using DzTile = PaddedTile<T, kDeltaChunkRows, kScanColumns>;
  static constexpr int kStateStageBytes = StateTile::kBytes + DzTile::kBytes;
  static constexpr int kKeyStageBytes = KeyStage::kBytes + (HasB ? BlockTile<T, D>::kBytes : 0),
                       kStageBytes = kKeyStageBytes + Query::kBytes + Query::kFactorBytes;  // of both rings

  unsigned char* data;
  int stages, state_stages;

  __host__ __device__ static constexpr int bytes(int stages, int state_stages) {
    return kReverseBarrierBytes + kReverseDuLocalStages * DuTile::kBytes + stages * kStageBytes +
           state_stages * kStateStageBytes;
  }

  __device__ DuTile du_local(int i) const { return {reinterpret_cast<T*>(data + i * DuTile::kBytes)}; }
  __device__ KeyStage stage(int i) const { return {after_du_local() + i * kKeyStageBytes}; }
  // B, or without HasB K: the operand of the update of dS.
  __device__ BlockTile<T, D> b_or_k(int i) const {
    return {reinterpret_cast<T*>(stage(i).data + (HasB ? KeyStage::kBytes : 0))};
  }
  __device__ Query query(int i) const {
    unsigned char* const queries = after_du_local() + stages * kKeyStageBytes;
    unsigned char* const factors = queries + stages * Query::kBytes;
    return {queries + i * Query::kBytes, factors + i * Query::kFactorBytes};
  }
  __device__ StateTile state(int i) const { return {reinterpret_cast<T*>(state_stage(i))}; }
  __device__ DzTile dz(int i) const { return {reinterpret_cast<T*>(state_stage(i) + StateTile::kBytes)}; }
  __device__ ReverseBarriers& barriers() const {
    return *reinterpret_cast<ReverseBarriers*>(data + bytes(stages, state_stages) - kReverseBarrierBytes);
  }

 private:
  __device__ unsigned char* after_du_local() const { return data + kReverseDuLocalStages * DuTile::kBytes; }
  __device__ unsigned char* state_stage(int i) const {
    return after_du_local() + stages * kStageBytes + i * kStateStageBytes;
  }
};

}  // namespace girih::kernels::delta_product

// Shared memory, barriers and roles of a block of reverse, and its load warps.
#pragma once

#include "delta_product/state.cuh"

namespace girih::kernels::delta_product {

constexpr int kReverseStateWarps = 4, kReverseProducerWarps = 4, kReverseStoreWarps = 2;  // numbers of warps
constexpr int kReverseThreads =
    32 * (kReverseStateWarps + kReverseProducerWarps + kReverseStoreWarps + kLoadWarps);

// q and do of one query head and chunk: `Rows` tokens, 64, or 32 if n > 1.
template <typename T, int D, int Rows>
struct QueryStage {
  using Q = BlockTile<T, D, Rows>;
  using DOut = BlockTile<T, kScanColumns, Rows>;
  static constexpr int kBytes = Q::kBytes + DOut::kBytes, kFactorBytes = Rows * 12;

  unsigned char *data, *after;

  __device__ Q q() const { return {reinterpret_cast<T*>(data)}; }
  __device__ DOut dout() const { return {reinterpret_cast<T*>(data + Q::kBytes)}; }
  // {scale rho_t, L_t}, and r_t, of every token.
  __device__ float2* tokens() const { return reinterpret_cast<float2*>(after); }
  __device__ float* read() const { return reinterpret_cast<float*>(after + Rows * 8); }
};

constexpr int kReverseStages = 4, kReverseStateStages = 2, kReverseDuStages = 2;

struct ReverseBarriers {
  uint64_t full[kReverseStages], empty[kReverseStages];            // ring of keys
  uint64_t du_full[kReverseDuStages], du_empty[kReverseDuStages];  // ring of dU without dS
  // Ring of query heads; ready: the factors of the tokens are stored.
  uint64_t query_full[kReverseStages], query_factors_full[kReverseStages], query_empty[kReverseStages];
  uint64_t state_full[kReverseStateStages], state_empty[kReverseStateStages];    // dS
  uint64_t update_full[kReverseStateStages], update_empty[kReverseStateStages];  // G, or dv
};
constexpr int kReverseBarrierBytes = 384;
static_assert(sizeof(ReverseBarriers) <= kReverseBarrierBytes, "");

// ReadKeys: as in ScanStorage.
template <typename T, int D, int Rows, bool ReadKeys = false>
struct ReverseStorage {
  using Keys = Stage<T, D, false>;
  using Query = QueryStage<T, D, Rows>;
  using StateTile = PaddedTile<T, kScanColumns, D>;
  using UpdateTile = PaddedTile<T, kDeltaChunkRows, kScanColumns>;
  static constexpr int kStateStageBytes = StateTile::kBytes + UpdateTile::kBytes;
  // Bytes of a stage of keys and of a stage of queries.
  static constexpr int kKeysBytes = Keys::kBytes + (ReadKeys ? BlockTile<T, D>::kBytes : 0),
                       kStageBytes = kKeysBytes + Query::kBytes + Query::kFactorBytes;

  unsigned char* data;
  int stages, state_stages;

  __host__ __device__ static constexpr int bytes(int stages, int state_stages) {
    return kReverseBarrierBytes + kReverseDuStages * Values<T>::kBytes + stages * kStageBytes +
           state_stages * kStateStageBytes;
  }

  __device__ Values<T> du(int i) const { return {reinterpret_cast<T*>(data + i * Values<T>::kBytes)}; }
  __device__ Keys stage(int i) const { return {after_du() + i * kKeysBytes}; }
  __device__ BlockTile<T, D> read_keys(int i) const {
    return {reinterpret_cast<T*>(stage(i).data + (ReadKeys ? Keys::kBytes : 0))};
  }
  __device__ Query query(int i) const {
    unsigned char* const queries = after_du() + stages * kKeysBytes;
    unsigned char* const after = queries + stages * Query::kBytes;
    return {queries + i * Query::kBytes, after + i * Query::kFactorBytes};
  }
  __device__ StateTile state(int i) const { return {reinterpret_cast<T*>(state_stage(i))}; }
  __device__ UpdateTile update(int i) const {
    return {reinterpret_cast<T*>(state_stage(i) + StateTile::kBytes)};
  }
  __device__ ReverseBarriers& barriers() const {
    return *reinterpret_cast<ReverseBarriers*>(data + bytes(stages, state_stages) - kReverseBarrierBytes);
  }

 private:
  __device__ unsigned char* after_du() const { return data + kReverseDuStages * Values<T>::kBytes; }
  __device__ unsigned char* state_stage(int i) const {
    return after_du() + stages * kStageBytes + i * kStateStageBytes;
  }
};

// Load warps, last chunk first: keys and prepared data, then q and do of its query heads.
template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void run_reverse_load_warps(const ReverseParams& params, const BlockWork& work,
                                              const ReverseStorage<T, D, Rows, ReadKeys>& space, int thread) {
  using Query = typename ReverseStorage<T, D, Rows, ReadKeys>::Query;
  using Keys = BlockTile<T, D>;
  const DeltaReverse& p = params.scan;
  const int n = p.shape.n, tokens = delta_chunk_tokens(n), group = p.shape.output_heads / p.shape.heads;
  const int64_t batch = work.range.sequence.batch, token = work.range.start, row = token * n,
                first_head = static_cast<int64_t>(work.head) * group;
  const StageCopier<Keys> keys(at<T>(p.k, batch, row, work.head / p.shape.key_share, 0), p.k.stride[1],
                               p.shape.D, thread);
  const StageCopier<typename Query::Q> q(at<T>(p.q, batch, token, first_head / p.shape.query_share, 0),
                                         p.q.stride[1], p.shape.D, thread);
  const StageCopier<typename Query::DOut> dout(at<T>(p.dout, batch, token, first_head, work.col),
                                               p.dout.stride[1], p.shape.V - work.col, thread);
  const StageCopier<Keys> read_keys(at<T>(p.b, batch, row, work.head, 0), p.b.stride[1], p.shape.D, thread);
  ReverseBarriers& barriers = space.barriers();
  PipelineState key_pipe, query_pipe;
#pragma unroll 1
  for (int i = 0; i < work.chunks; ++i) {
    const int c = work.chunks - 1 - i, length = chunk_length(work, tokens, c);
    wait(&barriers.empty[key_pipe.stage], key_pipe.phase ^ 1);
    const unsigned char* const prepared = prepared_at(p.prepared, p.shape, work.first_chunk + c, work.head);
    const auto stage = space.stage(key_pipe.stage);
    keys.start(stage.k(), c * tokens * n, length * n);
    stage.start_prepared(prepared, thread);
    if (ReadKeys) read_keys.start(space.read_keys(key_pipe.stage), c * tokens * n, length * n);
    arrive_after_copies(&barriers.full[key_pipe.stage]);
    key_pipe.next(params.stages);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      wait(&barriers.query_empty[query_pipe.stage], query_pipe.phase ^ 1);
      const Query query = space.query(query_pipe.stage);
      q.start(query.q(), c * tokens, length, member * p.q.stride[2]);
      dout.start(query.dout(), c * tokens, length, member * p.dout.stride[2]);
      arrive_after_copies(&barriers.query_full[query_pipe.stage]);
      query_pipe.next(params.stages);
    }
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace girih::kernels::delta_product

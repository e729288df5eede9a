// Shared memory, barriers and roles of a block of reverse, and its load warps.
#pragma once

#include "delta_product/state.cuh"

namespace girih::kernels::delta_product {

constexpr int kReverseChain = 4, kReverseMakers = 4, kReverseStores = 2;  // numbers of warps
constexpr int kReverseThreads = 32 * (kReverseChain + kReverseMakers + kReverseStores + kLoaders);

// q and do of one query head and chunk: `Rows` tokens, 64, or 32 if n > 1.
template <typename T, int D, int Rows>
struct GradientStage {
  using Q = BlockTile<T, D, Rows>;
  using O = BlockTile<T, kScanColumns, Rows>;
  static constexpr int kBytes = Q::kBytes + O::kBytes, kFactorBytes = Rows * 12;

  unsigned char *data, *after;

  __device__ Q q() const { return {reinterpret_cast<T*>(data)}; }
  __device__ O dout() const { return {reinterpret_cast<T*>(data + Q::kBytes)}; }
  // {scale rho_t, L_t}, and r_t, of every token.
  __device__ float2* tokens() const { return reinterpret_cast<float2*>(after); }
  __device__ float* read() const { return reinterpret_cast<float*>(after + Rows * 8); }
};

constexpr int kReverseStages = 4, kReverseSlots = 2, kReverseMade = 2;

struct ReverseBarriers {
  uint64_t full[kReverseStages], empty[kReverseStages];  // ring of keys
  uint64_t made[kReverseMade], used[kReverseMade];       // ring of dU without dS
  // Ring of query heads; ready: the factors of the tokens are stored.
  uint64_t query_full[kReverseStages], query_ready[kReverseStages], query_empty[kReverseStages];
  uint64_t state[kReverseSlots], state_stored[kReverseSlots];    // dS
  uint64_t update[kReverseSlots], update_stored[kReverseSlots];  // G, or dv
};
constexpr int kReverseBarrierBytes = 384;
static_assert(sizeof(ReverseBarriers) <= kReverseBarrierBytes, "");

// ReadKeys: as in ScanSpace.
template <typename T, int D, int Rows, bool ReadKeys = false>
struct ReverseSpace {
  using Keys = Stage<T, D, false>;
  using Query = GradientStage<T, D, Rows>;
  using StateSlot = PaddedTile<T, kScanColumns, D>;
  using UpdateSlot = PaddedTile<T, kDeltaRows, kScanColumns>;
  static constexpr int kSlotBytes = StateSlot::kBytes + UpdateSlot::kBytes;
  // Bytes of a stage of keys and of a stage of queries.
  static constexpr int kKeysBytes = Keys::kBytes + (ReadKeys ? BlockTile<T, D>::kBytes : 0),
                       kStageBytes = kKeysBytes + Query::kBytes + Query::kFactorBytes;

  unsigned char* data;
  int stages, slots;

  __host__ __device__ static constexpr int bytes(int stages, int slots) {
    return kReverseBarrierBytes + kReverseMade * Values<T>::kBytes + stages * kStageBytes +
           slots * kSlotBytes;
  }

  __device__ Values<T> made(int i) const { return {reinterpret_cast<T*>(data + i * Values<T>::kBytes)}; }
  __device__ Keys stage(int i) const { return {after_made() + i * kKeysBytes}; }
  __device__ BlockTile<T, D> read_keys(int i) const {
    return {reinterpret_cast<T*>(stage(i).data + (ReadKeys ? Keys::kBytes : 0))};
  }
  __device__ Query query(int i) const {
    unsigned char* const queries = after_made() + stages * kKeysBytes;
    unsigned char* const after = queries + stages * Query::kBytes;
    return {queries + i * Query::kBytes, after + i * Query::kFactorBytes};
  }
  __device__ StateSlot state(int i) const { return {reinterpret_cast<T*>(slot(i))}; }
  __device__ UpdateSlot update(int i) const { return {reinterpret_cast<T*>(slot(i) + StateSlot::kBytes)}; }
  __device__ ReverseBarriers& barriers() const {
    return *reinterpret_cast<ReverseBarriers*>(data + bytes(stages, slots) - kReverseBarrierBytes);
  }

 private:
  __device__ unsigned char* after_made() const { return data + kReverseMade * Values<T>::kBytes; }
  __device__ unsigned char* slot(int i) const { return after_made() + stages * kStageBytes + i * kSlotBytes; }
};

// Load warps, last chunk first: keys and prepared data, then q and do of its query heads.
template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void load_reverse(const ReversePass& pass, const Part& part,
                                    const ReverseSpace<T, D, Rows, ReadKeys>& space, int thread) {
  using Query = typename ReverseSpace<T, D, Rows, ReadKeys>::Query;
  using Keys = BlockTile<T, D>;
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), group = p.shape.query_heads / p.shape.heads;
  const int64_t batch = part.piece.sequence.batch, token = part.piece.start, row = token * n,
                first_head = static_cast<int64_t>(part.head) * group;
  const StageCopier<Keys> keys(at<T>(p.k, batch, row, part.head / p.shape.key_share, 0), p.k.stride[1],
                               p.shape.D, thread);
  const StageCopier<typename Query::Q> q(at<T>(p.q, batch, token, first_head / p.shape.query_share, 0),
                                         p.q.stride[1], p.shape.D, thread);
  const StageCopier<typename Query::O> dout(at<T>(p.dout, batch, token, first_head, part.col),
                                            p.dout.stride[1], p.shape.V - part.col, thread);
  const StageCopier<Keys> read_keys(at<T>(p.b, batch, row, part.head, 0), p.b.stride[1], p.shape.D, thread);
  ReverseBarriers& barriers = space.barriers();
  Turn turn, query_turn;
#pragma unroll 1
  for (int i = 0; i < part.chunks; ++i) {
    const int c = part.chunks - 1 - i, length = tokens_in(part, tokens, c);
    wait(&barriers.empty[turn.place], turn.parity ^ 1);
    const unsigned char* const prepared = prepared_at(p.prepared, p.shape, part.chunk + c, part.head);
    const auto stage = space.stage(turn.place);
    keys.start(stage.k(), c * tokens * n, length * n);
    stage.start_prepared(prepared, thread);
    if (ReadKeys) read_keys.start(space.read_keys(turn.place), c * tokens * n, length * n);
    arrive_after_copies(&barriers.full[turn.place]);
    turn.next(pass.stages);
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      wait(&barriers.query_empty[query_turn.place], query_turn.parity ^ 1);
      const Query query = space.query(query_turn.place);
      q.start(query.q(), c * tokens, length, member * p.q.stride[2]);
      dout.start(query.dout(), c * tokens, length, member * p.dout.stride[2]);
      arrive_after_copies(&barriers.query_full[query_turn.place]);
      query_turn.next(pass.stages);
    }
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace girih::kernels::delta_product

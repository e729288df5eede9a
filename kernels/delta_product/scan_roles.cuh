// The load, store and fence warps of the scan, and the registers of all roles.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

template <typename T, int D, class Space>
__device__ inline void load_stages(const ScanPass& pass, const Part& part, const Space& space,
                                   bool with_values, int thread) {
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n);
  auto& barriers = space.barriers();
  const int64_t batch = part.piece.sequence.batch, row = part.piece.start * n;
  using Keys = BlockTile<T, D>;
  const StageCopier<Keys> keys(at<T>(p.k, batch, row, part.head / p.shape.key_share, 0), p.k.stride[1],
                               p.shape.D, thread);
  const StageCopier<Values<T>> values(at<T>(p.v, batch, row, part.head, part.col), p.v.stride[1],
                                      p.shape.V - part.col, thread);
  // Also the next 64 columns of v, if the second state warpgroup has them.
  const bool next_too = pass.chains == 2 && !pairs_transitions(p.shape, pass.walk, 2);
  const unsigned char* prepared = prepared_at(p.prepared, p.shape, part.chunk, part.head);
  const StageCopier<Keys> read_keys(at<T>(p.b, batch, row, part.head, 0), p.b.stride[1], p.shape.D, thread);
  Turn turn;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c, prepared += int64_t{p.shape.heads} * kDeltaPreparedBytes) {
    wait(&barriers.empty[turn.place], turn.parity ^ 1);
    const Stage<T, D> stage = space.stage(turn.place);
    const int first = c * tokens * n, rows = tokens_in(part, tokens, c) * n;
    keys.start(stage.k(), first, rows);
    stage.start_prepared(prepared, thread);
    if constexpr (Space::kReadKeys) read_keys.start(space.read_keys(turn.place), first, rows);
    if (with_values) values.start(stage.v(), first, part.transition ? 0 : rows);
    if (Space::kChains == 2 && next_too) {
      const StageCopier<Values<T>> next(at<T>(p.v, batch, row, part.head, part.col + kScanColumns),
                                        p.v.stride[1], p.shape.V - part.col - kScanColumns, thread);
      next.start(space.values(turn.place, 1), first, part.transition ? 0 : rows);
    }
    arrive_after_copies(&barriers.full[turn.place]);
    turn.next(pass.stages);
  }
  commit_copies();
  wait_copies<0>();
}

// A store warp stores the states before the chunks: store(tile, to, rows, cols).
template <typename T, class Space, class Store>
__device__ inline void store_states(const ScanPass& pass, const Part& part, const Space& space,
                                    const Store& store) {
  const DeltaScan& p = pass.scan;
  if (p.states == nullptr) return;
  auto& barriers = space.barriers();
  Turn slot;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    T* const to = state_at(static_cast<T*>(p.states), p.shape, part.chunk + c, part.head, part.col);
    wait(&barriers.state[slot.place], slot.parity);
    store(space.state(slot.place), to, p.shape.V - part.col, p.shape.D);
    arrive_once(&barriers.read[slot.place]);
    slot.next(pass.slots);
  }
}
template <typename T, class Space>
__device__ inline void store_states(const ScanPass& pass, const Part& part, const Space& space) {
  store_states<T>(pass, part, space, [](const auto& tile, T* to, int rows, int cols) {
    store_rows<1>(tile, to, cols, rows, cols, 0);
  });
}

// The fence makes the loads (cp.async) visible to wgmma (async proxy). A warp of its own executes the fence:
// in the state warps the fence took a tenth of their time.
template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void fence_stages(const ScanPass& pass, const Part& part,
                                    const ScanSpace<T, D, Rows, ReadKeys>& space) {
  ScanBarriers& barriers = space.barriers();
  Turn turn;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    wait(&barriers.full[turn.place], turn.parity);
    fence_tiles();
    arrive_once(&barriers.ready[turn.place]);
    turn.next(pass.stages);
  }
}

// Registers of a thread by role. The state warps need more than an equal share. kShared: warpgroups change
// their registers by setmaxnreg; otherwise every thread has its registers at launch.
template <int D, int Rows>
struct ScanRegisters {
  static constexpr bool kShared = Rows != kAlone || D <= 128;
  static constexpr int kOthers = D == 256                    ? 96
                                 : D == 64 || Rows == kAlone ? 88
                                                             : 72,
                       kReaders = D == 256            ? 168
                                  : Rows < kDeltaRows ? 112
                                                      : 128,
                       kChain = D == 256         ? 240
                                : Rows == kAlone ? 208
                                                 : 512 - kOthers - 2 * kReaders;
};

}  // namespace girih::kernels::delta_product

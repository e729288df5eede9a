// The load, store and fence warps of the scan, and the registers of its roles.
#pragma once

#include "delta_product/scan_storage.cuh"

namespace girih::kernels::delta_product {

// Load warps: fill the ring of keys, values and prepared data. `with_values`: the block reads v.
template <typename T, int D, class Storage>
__device__ inline void load_stages(const ScanParams& params, const BlockWork& work, const Storage& storage,
                                   bool with_values, int thread) {
  const DeltaScan& p = params.problem;
  const int n = p.shape.n, tokens = delta_chunk_tokens(n);
  auto& barriers = storage.barriers();
  const int64_t batch = work.range.sequence.batch, row = work.range.start * n;
  using Keys = BlockTile<T, D>;
  const StageCopier<Keys> keys(at<T>(p.k, batch, row, work.head / p.shape.key_share, 0), p.k.stride[1],
                               p.shape.D, thread);
  const StageCopier<Values<T>> values(at<T>(p.v, batch, row, work.head, work.col), p.v.stride[1],
                                      p.shape.V - work.col, thread);
  // Also the next 64 columns of v, if the second state warpgroup has them.
  const bool has_next_values = params.state_groups == 2 && !has_paired_transition(p.shape, params.grid, 2);
  const unsigned char* prepared = prepared_at(p.prepared, p.shape, work.first_chunk, work.head);
  const StageCopier<Keys> b(at<T>(p.b, batch, row, work.head, 0), p.b.stride[1], p.shape.D, thread);
  PipelineState key_pipe;
#pragma unroll 1
  for (int c = 0; c < work.chunks; ++c, prepared += int64_t{p.shape.heads} * kDeltaPreparedBytes) {
    barriers.empty.wait(key_pipe);
    const Stage<T, D> stage = storage.stage(key_pipe.stage);
    const int first = c * tokens * n, rows = chunk_length(work, tokens, c) * n;
    keys.start(stage.k(), first, rows);
    stage.start_prepared(prepared, thread);
    if constexpr (Storage::kHasB) b.start(storage.b_or_k(key_pipe.stage), first, rows);
    if (with_values) values.start(stage.v(), first, work.is_transition ? 0 : rows);
    if (Storage::kStateGroups == 2 && has_next_values) {
      const StageCopier<Values<T>> next(at<T>(p.v, batch, row, work.head, work.col + kScanColumns),
                                        p.v.stride[1], p.shape.V - work.col - kScanColumns, thread);
      next.start(storage.values(key_pipe.stage, 1), first, work.is_transition ? 0 : rows);
    }
    barriers.full.arrive_after_copies(key_pipe.stage);
    key_pipe.next(params.stages);
  }
  // A thread does not exit before its copies are complete.
  commit_copies();
  wait_copies<0>();
}

// A store warp stores the states before the chunks by store(tile, to, rows, cols). A row of S^T is a column
// of V.
template <typename T, class Storage, class Store>
__device__ inline void store_states(const ScanParams& params, const BlockWork& work, const Storage& storage,
                                    const Store& store) {
  const DeltaScan& p = params.problem;
  if (p.states == nullptr) return;
  auto& barriers = storage.barriers();
  PipelineState state_pipe;
#pragma unroll 1
  for (int c = 0; c < work.chunks; ++c) {
    T* const to = state_at(static_cast<T*>(p.states), p.shape, work.first_chunk + c, work.head, work.col);
    barriers.state_full.wait(state_pipe);
    store(storage.state(state_pipe.stage), to, p.shape.V - work.col, p.shape.D);
    barriers.state_empty.arrive_warp(state_pipe.stage);
    state_pipe.next(params.state_stages);
  }
}
template <typename T, class Storage>
__device__ inline void store_states(const ScanParams& params, const BlockWork& work, const Storage& storage) {
  store_states<T>(params, work, storage, [](const auto& tile, T* to, int rows, int cols) {
    store_rows<1>(tile, to, cols, rows, cols, 0);
  });
}

// The fence makes the loads (cp.async) visible to wgmma (async proxy). A warp of its own executes the fence:
// in the state warps the fence took a tenth of their time.
template <typename T, int D, int Rows, bool HasB>
__device__ inline void fence_stages(const ScanParams& params, const BlockWork& work,
                                    const ScanStorage<T, D, Rows, HasB>& storage) {
  ScanBarriers& barriers = storage.barriers();
  PipelineState key_pipe;
#pragma unroll 1
  for (int c = 0; c < work.chunks; ++c) {
    barriers.full.wait(key_pipe);
    fence_async_proxy();
    barriers.proxy_full.arrive_warp(key_pipe.stage);
    key_pipe.next(params.stages);
  }
}

// Registers of a thread by role. The state warps need more than an equal share. kHasSetmaxnreg: warpgroups
// change their registers by setmaxnreg; otherwise every thread has its registers at launch.
template <int D, int Rows>
struct ScanRegisters {
  static constexpr bool kHasSetmaxnreg = Rows != kStateOnly || D <= 128;
  static constexpr int kOther = D == 256                        ? 96
                                : D == 64 || Rows == kStateOnly ? 88
                                                                : 72,
                       kOutput = D == 256                 ? 168
                                 : Rows < kDeltaChunkRows ? 112
                                                          : 128,
                       kState = D == 256             ? 240
                                : Rows == kStateOnly ? 208
                                                     : 512 - kOther - 2 * kOutput;
};

}  // namespace girih::kernels::delta_product

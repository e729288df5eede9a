// The scan by a cluster of two blocks, if the GPU has two multiprocessors for each. Block 0 has the state
// warps, block 1 has three output warpgroups instead of two: the warps that hold the state in block 0 compute
// output in block 1. In one block both roles compete for the tensor cores and for instruction issue (a chunk
// of 4 x 4096 tokens, 16 heads of 64: 0.84 us instead of 1.10). With two output warpgroups the state warps
// would wait for an eighth of their time.
#pragma once

#include "delta_product/scan_output_warps.cuh"
#include "delta_product/scan_output_warps_transposed.cuh"
#include "delta_product/scan_roles.cuh"
#include "delta_product/scan_state_warps.cuh"
#include "pipe/clusters.h"

namespace girih::kernels::delta_product {

constexpr int kClusterOutputGroups = 3;
static_assert(kClusterOutputGroups <= kMaxStages && kClusterOutputGroups <= kMaxStateStages,
              "every output warpgroup has a stage of each ring");

// A warp of block 0 copies S and U to block 1 as soon as they are stored.
template <typename T, int D, int Rows>
__device__ inline void send_states(const BlockWork& work, int state_stages,
                                   const ScanStorage<T, D, Rows>& storage) {
  using Storage = ScanStorage<T, D, Rows>;
  ScanBarriers& barriers = storage.barriers();
  PipelineState state_pipe;
#pragma unroll 1
  for (int c = 0; c < work.chunks; ++c) {
    barriers.state_full.wait(state_pipe);
    if (lane() == 0)
      copy_to_remote(storage.state(state_pipe.stage).data, Storage::State::kBytes,
                     barriers.state_full.at(state_pipe.stage), 1);
    __syncwarp();
    barriers.update_full.wait(state_pipe);
    __syncwarp();  // the stage may be refilled after the copy, so all lanes must have seen this phase
    if (lane() == 0)
      copy_to_remote(storage.update(state_pipe.stage).data, Storage::Update::kBytes,
                     barriers.update_full.at(state_pipe.stage), 1);
    __syncwarp();
    state_pipe.next(state_stages);
  }
}

// Selects the role of a warp in either block.
template <typename T, int D, int Rows>
__device__ inline void run_cluster_block(const ScanParams& params, const BlockWork& work,
                                         const ScanStorage<T, D, Rows>& storage, bool has_output) {
  using Roles = ScanRoles<D, Rows>;
  using Registers = ScanRegisters<D, Rows>;
  const int warp = warp_index(),
            other = warp - Roles::kStateGroupWarps - Roles::kOutputGroups * Roles::kOutputGroupWarps;
  if (warp < Roles::kStateGroupWarps && !has_output) {
    setmaxnreg_inc<Registers::kState>();
    return run_state_warps(params, work, storage, 0, warp);
  }
  if (other < 0) {
    static_assert(kClusterOutputGroups * Roles::kOutputGroupWarps ==
                  Roles::kStateGroupWarps + Roles::kOutputGroups * Roles::kOutputGroupWarps);
    static_assert(
        fit_registers(Roles::kThreads, {{kClusterOutputGroups, Registers::kOutput}, {1, Registers::kOther}}));
    const int output_group = warp / Roles::kOutputGroupWarps, warp_of_group = warp % Roles::kOutputGroupWarps;
    setmaxnreg_dec<Registers::kOutput>();
    if (!has_output) {
      if (warp == Roles::kStateGroupWarps) send_states(work, params.state_stages, storage);
      return;
    }
    if constexpr (Rows == ScanStorage<T, D, Rows>::kTokens) {
      return run_transposed_output_warps<true>(params, work, storage, output_group, warp_of_group);
    } else {
      return run_output_warps<true>(params, work, storage, output_group, warp_of_group);
    }
  }
  setmaxnreg_dec<Registers::kOther>();
  if (other == 0) {
    if (!has_output) store_states<T>(params, work, storage);
  } else if (other == 1) {
    fence_stages(params, work, storage);
  } else {
    load_stages<T, D>(params, work, storage, !has_output, threadIdx.x - (Roles::kThreads - 32 * kLoadWarps));
  }
}

template <typename T, int D, int Rows>
__global__ void __launch_bounds__(ScanRoles<D, Rows>::kThreads, 1)
    scan_cluster(const __grid_constant__ ScanParams params) {
  using Roles = ScanRoles<D, Rows>;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
  BlockWork work;
  if (!find_work(params.problem.shape, params.grid, blockIdx.x / 2, work)) return;
  const bool has_output = cluster_rank() == 1;
  const ScanStorage<T, D, Rows> storage{shared, params.stages, params.state_stages, params.output_groups};
  ScanBarriers& barriers = storage.barriers();
  barriers.full.init(32 * kLoadWarps, params.stages);
  barriers.proxy_full.init(arrival_count(1), params.stages);
  barriers.empty.init(arrival_count(has_output ? Roles::kOutputGroupWarps : Roles::kStateGroupWarps),
                      params.stages);
  const int state_arrivals = has_output ? 1 : arrival_count(Roles::kStateGroupWarps);
  barriers.state_full.init(state_arrivals, params.state_stages);
  barriers.update_full.init(state_arrivals, params.state_stages);
  barriers.state_empty.init(
      Roles::kOutputGroupWarps + (params.problem.states == nullptr ? 0 : arrival_count(Roles::kStoreWarps)),
      params.state_stages);
  fence_barrier_init();
  cluster_sync();
  run_cluster_block(params, work, storage, has_output);
  // A block must not exit while the other block accesses its shared memory.
  cluster_sync();
}

template <typename T, int D, int Rows>
cudaError_t launch_scan_cluster(ScanParams params, int64_t blocks, int limit, cudaStream_t stream) {
  using Storage = ScanStorage<T, D, Rows>;
  // Copies may complete out of order. Each stage of states belongs to one output warpgroup, which sees all
  // phases of its barriers.
  params.state_stages = params.output_groups = kClusterOutputGroups;
  constexpr auto kernel = scan_cluster<T, D, Rows>;
  if (const cudaError_t error = allow_shared<kernel>(limit); error != cudaSuccess) return error;
  return launch_clusters<kernel>(params, static_cast<unsigned>(2 * blocks), 2, ScanRoles<D, Rows>::kThreads,
                                 Storage::bytes(params.stages, params.state_stages, params.output_groups),
                                 stream);
}

}  // namespace girih::kernels::delta_product

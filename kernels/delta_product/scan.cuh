// The kernel of the scan, chunk after chunk; the letters are those of kernels.h:
//
//     Y = K S        Z_i = beta_i v_i - read_i Y_i        U = X Z        S <- e^{L_C} S + K^T (w * U)
//     Y = B S        with b in place of beta k
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j          S the state before the chunk
//
// A block has 64 columns of V of the state of one head, for all chunks of a sequence or of a segment. The
// time of a chunk is the latency of the dependent products Y, U and S, so one warpgroup (the state warps)
// computes nothing else. The other roles are one or two output warpgroups, a store warp for states, two load
// warps and a fence warp. At D = 64, if the GPU has two multiprocessors for each block, a cluster of two
// blocks shares the work (scan_cluster.cuh). At D = 128 the state warps compute the output too where possible
// (scan_fused.cuh). A launch with `is_local` has no output; its blocks have two groups of columns if one each
// would exceed the GPU.
#pragma once

#include "delta_product/scan_cluster.cuh"
#include "delta_product/scan_fused.cuh"
#include "pipe/fit.h"
#include "tile/segments.h"

namespace girih::kernels::delta_product {

template <typename T, int D, int Rows, bool HasB>
__global__ void __launch_bounds__(ScanRoles<D, Rows>::kThreads, 1)
    scan(const __grid_constant__ ScanParams params) {
  using Roles = ScanRoles<D, Rows>;
  using Storage = ScanStorage<T, D, Rows, HasB>;
  using Registers = ScanRegisters<D, Rows>;
  static_assert(fit_registers(Roles::kThreads, {{Roles::kStateGroups, Registers::kState},
                                                {Roles::kOutputGroups, Registers::kOutput},
                                                {1, Registers::kOther}}));
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
  BlockWork work;
  if (!find_work(params.problem.shape, params.grid, blockIdx.x, work, 0, params.state_groups)) return;
  BlockWork second;
  bool has_second = false;
  if constexpr (Roles::kStateGroups == 2) {
    has_second =
        params.state_groups == 2 && find_work(params.problem.shape, params.grid, blockIdx.x, second, 1, 2);
  }
  const Storage storage{shared, params.stages, params.state_stages, params.output_groups};
  ScanBarriers& barriers = storage.barriers();
  barriers.full.init(32 * kLoadWarps, params.stages);
  barriers.proxy_full.init(arrival_count(1), params.stages);
  barriers.empty.init(
      arrival_count((has_second ? 2 : 1) * Roles::kStateGroupWarps + Roles::kOutputGroupWarps),
      params.stages);
  barriers.state_full.init(arrival_count(Roles::kStateGroupWarps), params.state_stages);
  barriers.update_full.init(arrival_count(Roles::kStateGroupWarps), params.state_stages);
  barriers.state_empty.init(
      arrival_count(Roles::kOutputGroupWarps + (params.problem.states == nullptr ? 0 : Roles::kStoreWarps)),
      params.state_stages);
  __syncthreads();
  const int warp = warp_index();
  if (warp < Roles::kStateGroups * Roles::kStateGroupWarps) {
    if (Registers::kHasSetmaxnreg) setmaxnreg_inc<Registers::kState>();
    if constexpr (Roles::kStateGroups == 2) {
      const bool is_second = warp >= Roles::kStateGroupWarps;
      if (is_second && !has_second) return;
      return run_state_warps(params, is_second ? second : work, storage, is_second,
                             warp % Roles::kStateGroupWarps);
    } else {
      return run_state_warps(params, work, storage, 0, warp);
    }
  }
  if constexpr (Rows == kStateOnly) {
    if (Registers::kHasSetmaxnreg) setmaxnreg_dec<Registers::kOther>();
    if (warp < Roles::kThreads / 32 - kLoadWarps) return;
  } else {
    const int output_warp = warp - Roles::kStateGroupWarps,
              other = output_warp - Roles::kOutputGroups * Roles::kOutputGroupWarps;
    if (other < 0) {
      const int output_group = output_warp / Roles::kOutputGroupWarps,
                warp_of_group = output_warp % Roles::kOutputGroupWarps;
      setmaxnreg_dec<Registers::kOutput>();
      if constexpr (Rows == Storage::kTokens) {
        return run_transposed_output_warps<false>(params, work, storage, output_group, warp_of_group);
      } else {
        return run_output_warps<false>(params, work, storage, output_group, warp_of_group);
      }
    }
    setmaxnreg_dec<Registers::kOther>();
    if (other == 0) return store_states<T>(params, work, storage);
    if (other == 1) return fence_stages(params, work, storage);
  }
  load_stages<T, D>(params, work, storage, true, threadIdx.x - (Roles::kThreads - 32 * kLoadWarps));
}

// Minimal shared memory of a block in bytes.
template <typename T, int D, bool HasB = false>
constexpr int scan_min_bytes() {
  return std::max(ScanStorage<T, D, kDeltaChunkRows, HasB>::bytes(1, 1, 1),
                  ScanStorage<T, D, kDeltaChunkRows / 2, HasB>::bytes(1, 1, 1));
}

template <typename T, int D, int Rows, bool HasB>
cudaError_t launch_scan_instance(const ScanParams& base_params, cudaStream_t stream) {
  using Storage = ScanStorage<T, D, Rows, HasB>;
  ScanParams params = base_params;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (Rows == kStateOnly) {
    params.stages = fit_stages(limit, kMaxStages, [](int stages) { return Storage::bytes(stages, 0, 0); });
    params.state_stages = params.output_groups = 0;
  } else {
    // The largest number of stages beside all output warpgroups, or beside one if that is zero. Two stages of
    // states with three stages of keys are faster than one with more.
    const auto fit = [&](int state_stages, int output_groups = ScanRoles<D, Rows>::kOutputGroups) {
      params.stages = fit_stages(
          limit, kMaxStages, [&](int stages) { return Storage::bytes(stages, state_stages, output_groups); });
      params.state_stages = state_stages;
      // An output warpgroup that skips chunks needs a stage of each ring of its own.
      params.output_groups = std::min({output_groups, params.stages, state_stages});
      return params.stages;
    };
    if (const int stages = fit(2); stages < 3 && fit(1) <= stages) fit(stages > 0 ? 2 : 1);
    if (params.stages == 0) fit(1, 1);
  }
  if (params.stages < 1) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = allow_shared<scan<T, D, Rows, HasB>>(limit); error != cudaSuccess)
    return error;
  // 1 x 32768 tokens, 8 heads of 128: 94 us instead of 122.
  params.state_groups = ScanRoles<D, Rows>::kStateGroups == 2 &&
                                count_local_groups(params.problem.shape, params.grid) > kMultiprocessors
                            ? 2
                            : 1;
  const int64_t blocks = block_count(params.problem.shape, params.grid, params.state_groups);
  if (blocks == 0) return cudaSuccess;
  if constexpr (D == 64 && Rows != kStateOnly && !HasB) {  // D = 128 uses scan_fused in one block
    bool can = false;
    if (blocks <= kMultiprocessors / 2 && params.stages >= kClusterOutputGroups &&
        Storage::bytes(params.stages, kClusterOutputGroups, kClusterOutputGroups) <= limit) {
      if (const cudaError_t error = has_clusters<scan_cluster<T, D, Rows>>(can); error != cudaSuccess)
        return error;
    }
    if (can) return launch_scan_cluster<T, D, Rows>(params, blocks, limit, stream);
  }
  if constexpr (D == 128 && Rows != kStateOnly && !HasB) {
    bool launched = false;
    const cudaError_t error = try_launch_fused<T, D, Rows>(params, limit, stream, launched);
    if (launched || error != cudaSuccess) return error;
  }
  const int bytes = Storage::bytes(params.stages, params.state_stages, params.output_groups);
  return launch_grid<scan<T, D, Rows, HasB>>(blocks, ScanRoles<D, Rows>::kThreads, bytes, stream, params);
}

template <typename T, int D, bool HasB>
cudaError_t launch_scan_by_rows(const ScanParams& params, cudaStream_t stream) {
  if (params.grid.is_local) return launch_scan_instance<T, D, kStateOnly, HasB>(params, stream);
  return has_many_tokens(delta_chunk_tokens(params.problem.shape.n))
             ? launch_scan_instance<T, D, kDeltaChunkRows, HasB>(params, stream)
             : launch_scan_instance<T, D, kDeltaChunkRows / 2, HasB>(params, stream);
}
template <typename T, int D>
cudaError_t launch_scan(const ScanParams& params, cudaStream_t stream) {
  if (params.problem.b.data == nullptr) return launch_scan_by_rows<T, D, false>(params, stream);
  if constexpr (D <= kDeltaChannelBetaMaxWidth) return launch_scan_by_rows<T, D, true>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels::delta_product

// The scan whose state warps compute the output too, for D of 65 to 128 and HO = H, on GPUs with wgmma. The
// rounded S and U are already the A fragments of both products of the output:
//
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//     P_tj = scale rho_t rho_j e^{L_t - L_j} q_t . k_j  (rows j of tokens <= t)
//
// so they do not go through shared memory. The time of a chunk is the instruction time of the state warps (a
// product with its A operand in registers blocks its warps). Intra-chunk warpgroups therefore compute all
// that does not depend on S, for chunks round-robin: P, and the factors of X in
//
//     U = Xb (v - a Y)        Xb = X diag(beta), a_i = rho_i e^{L_i}
//
// The other warps load queries and store outputs, store states, and load keys and values. (n = 2, 4 x 4096
// tokens, 16 heads, no gates: 135 us instead of 163 by output warps, which read S and U from shared memory.)
// A block has one state warpgroup and two intra-chunk warpgroups. If the GPU is full (has_two_state_groups),
// a block has two state warpgroups with 64 columns of V each and one intra-chunk warpgroup: both use the same
// loads and scores, and the products of one run while the other waits.
#pragma once

#include "delta_product/fused_intra_chunk_warps.cuh"
#include "delta_product/fused_load_store_warps.cuh"
#include "delta_product/fused_state_warps.cuh"
#include "pipe/fit.h"
#include "tile/launch.h"
#include "tile/segments.h"

namespace girih::kernels::delta_product {

template <typename T, int D, int Rows, bool HasFactors, int StateGroups>
__global__ void __launch_bounds__(FusedRoles<StateGroups>::kThreads, 1)
    scan_fused(const __grid_constant__ ScanParams params) {
#if __CUDA_ARCH__ >= 900  // launched on sm_90a only
  using Roles = FusedRoles<StateGroups>;
  using Storage = FusedStorage<T, D, Rows, StateGroups>;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
  BlockWork work;
  if (!find_work(params.problem.shape, params.grid, blockIdx.x, work, 0, StateGroups)) return;
  const Storage storage{shared, params.stages, params.query_stages, params.state_stages};
  FusedBarriers& barriers = storage.barriers();
  barriers.full.init(32 * kLoadWarps, params.stages);
  barriers.empty.init(arrival_count(Roles::kStateWarps), params.stages);
  barriers.query_full.init(params.problem.states == nullptr ? 64 : 32, params.query_stages);
  barriers.scores_full.init(arrival_count(Roles::kIntraChunkGroupWarps), params.query_stages);
  barriers.query_empty.init(arrival_count(Roles::kStateWarps), params.query_stages);
  barriers.output_full.init(arrival_count(Roles::kStateWarps), params.query_stages);
  barriers.state_full.init(arrival_count(Roles::kStateWarps), params.state_stages);
  barriers.state_empty.init(arrival_count(1), params.state_stages);
  __syncthreads();
  const int warp = warp_index(), intra_chunk_warp = warp - Roles::kStateWarps,
            other = intra_chunk_warp - Roles::kIntraChunkGroups * Roles::kIntraChunkGroupWarps;
  if (intra_chunk_warp < 0) {
    setmaxnreg_inc<Roles::kStateRegisters>();
    return run_fused_state_warps<HasFactors>(params, work, storage, warp);
  }
  if (other < 0) {
    setmaxnreg_dec<Roles::kIntraChunkRegisters>();
    return run_fused_intra_chunk_warps<HasFactors>(params, work, storage,
                                                   intra_chunk_warp / Roles::kIntraChunkGroupWarps,
                                                   intra_chunk_warp % Roles::kIntraChunkGroupWarps);
  }
  setmaxnreg_dec<Roles::kOtherRegisters>();
  // If no states are stored, the store warp of the states is a second token warp.
  if (other < 2 && params.problem.states == nullptr)
    return run_fused_token_warps<2>(params, work, storage, other);
  if (other == 0) return run_fused_store_warp(params, work, storage);
  if (other == 1) return run_fused_token_warps<1>(params, work, storage, 0);
  run_fused_load_warp(params, work, storage, other - 2);
#endif
}

// True if a block has two state warpgroups. Such a block takes 1.75 times as long (1.94 times with factors
// and n = 1), so this pays if the number of waves of blocks decreases by more (1 x 8192 tokens, 96 heads: 364
// us instead of 430 with prepare; 8 x 8192 tokens, 16 heads, with gates: 484 instead of 497). With segments
// it is false: some blocks of packed sequences are empty, so the number of waves is unknown.
inline bool has_two_state_groups(const ScanParams& params, bool has_factors) {
  const DeltaShape& shape = params.problem.shape;
  const int64_t blocks = block_count(shape, params.grid);
  const int hundredths = has_factors && shape.n == 1 ? 194 : 175;
  return params.grid.segment_tokens == 0 && column_groups(shape.V) % 2 == 0 &&
         hundredths * divide_up(blocks / 2, kMultiprocessors) <= 100 * divide_up(blocks, kMultiprocessors);
}

// Chooses the largest rings that fit, with at least as many stages of queries as of keys. False if none fits.
template <class Storage>
inline bool fit_fused_stages(ScanParams& params, int limit) {
  params.state_stages = params.problem.states == nullptr ? 0 : Storage::kStateGroups == 1 ? 2 : 1;
  const auto bytes = [&](int stages, int query_stages) {
    return Storage::bytes(stages, query_stages, params.state_stages);
  };
  params.stages =
      fit_stages(limit, kMaxStages, [&](int stages) { return bytes(stages, std::max(stages, 3)); });
  params.query_stages =
      fit_stages(limit, kMaxQueryStages, [&](int stages) { return bytes(params.stages, stages); });
  return params.stages > 1;
}

template <typename T, int D, int Rows, bool HasFactors, int StateGroups>
cudaError_t launch_fused(const ScanParams& params, int limit, cudaStream_t stream) {
  const int bytes =
      FusedStorage<T, D, Rows, StateGroups>::bytes(params.stages, params.query_stages, params.state_stages);
  const int64_t blocks = block_count(params.problem.shape, params.grid, StateGroups);
  return launch_kernel<scan_fused<T, D, Rows, HasFactors, StateGroups>>(
      params, blocks, FusedRoles<StateGroups>::kThreads, bytes, stream, limit);
}

// Launches this kernel and sets `launched` if device and shape allow it; otherwise does not change
// `launched`.
template <typename T, int D, int Rows>
cudaError_t try_launch_fused(ScanParams params, int limit, cudaStream_t stream, bool& launched) {
  const DeltaShape& shape = params.problem.shape;
  if (shape.heads != shape.output_heads) return cudaSuccess;
  bool can = false;
  if (const cudaError_t error = has_warpgroups<scan_fused<T, D, Rows, false, 1>>(can);
      error != cudaSuccess || !can) {
    return error;
  }
  const bool has_factors = params.problem.gated || shape.unit;
  if (has_two_state_groups(params, has_factors) &&
      fit_fused_stages<FusedStorage<T, D, Rows, 2>>(params, limit)) {
    launched = true;
    return has_factors ? launch_fused<T, D, Rows, true, 2>(params, limit, stream)
                       : launch_fused<T, D, Rows, false, 2>(params, limit, stream);
  }
  if (!fit_fused_stages<FusedStorage<T, D, Rows, 1>>(params, limit)) return cudaSuccess;
  launched = true;
  return has_factors ? launch_fused<T, D, Rows, true, 1>(params, limit, stream)
                     : launch_fused<T, D, Rows, false, 1>(params, limit, stream);
}

}  // namespace girih::kernels::delta_product

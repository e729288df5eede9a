// reverse: the gradient of the state, chunks from the last to the first. dS is the gradient of the state
// after the chunk, G the gradient of Z. The other letters are those of kernels.h.
//
//     dU_j = sum_t P_tj do_t + w_j dS^T k_j        G = X^T dU
//     dS <- e^{L_C} dS + sum_t r_t q_t do_t^T - sum_i k_i read_i G_i^T
//
// With b in place of beta k (no gates, no l2norm_qk), b_i replaces read_i k_i.
//
// A block has 64 columns of V of dS of one memory head, for all chunks of a sequence or of a segment. The
// roles are a warpgroup of state warps with dS^T in registers, a warpgroup of intra-chunk warps that computes
// P and du_local_j = sum_t P_tj do_t ahead, two store warps for dS and dz (the tensor of G or dv), and two
// load warps. A chunk uses one stage of the ring of keys, and for each output head of the memory head one
// stage of the ring of query heads.
#pragma once

#include "delta_product/reverse_intra_chunk_warps.cuh"
#include "delta_product/reverse_load_warps.cuh"
#include "delta_product/reverse_state_warps.cuh"
#include "pipe/fit.h"

namespace girih::kernels::delta_product {

// Stores dS and dz of every chunk.
template <typename T, int D, int Rows, bool HasB>
__device__ inline void run_reverse_store_warps(const ReverseParams& params, const BlockWork& work,
                                               const ReverseStorage<T, D, Rows, HasB>& storage,
                                               int warp_of_role) {
  const DeltaReverse& p = params.problem;
  const int n = p.shape.n, tokens = delta_chunk_tokens(n), cols = p.shape.V - work.col;
  ReverseBarriers& barriers = storage.barriers();
  PipelineState state_pipe;
#pragma unroll 1
  for (int c = work.chunks - 1; c >= 0; --c) {
    T* const ds = state_at(static_cast<T*>(p.gradients), p.shape, work.first_chunk + c, work.head, work.col);
    barriers.state_full.wait(state_pipe);
    // A row of dS^T is a column of V.
    store_rows<kReverseStoreWarps>(storage.state(state_pipe.stage), ds, p.shape.D, cols, p.shape.D,
                                   warp_of_role);
    barriers.state_empty.arrive_warp(state_pipe.stage);
    T* const dz =
        at<T>(p.dz, work.range.sequence.batch, (work.range.start + c * tokens) * n, work.head, work.col);
    barriers.dz_full.wait(state_pipe);
    store_rows<kReverseStoreWarps>(storage.dz(state_pipe.stage), dz, p.dz.stride[1],
                                   chunk_length(work, tokens, c) * n, cols, warp_of_role);
    barriers.dz_empty.arrive_warp(state_pipe.stage);
    state_pipe.next(params.state_stages);
  }
}

// Registers of a thread by role.
template <int D>
struct ReverseRegisters {
  static constexpr int kState = D == 256 ? 240 : 216, kIntraChunk = D == 256 ? 152 : 168,
                       kOther = launch_registers(kReverseThreads) - kState - kIntraChunk;
};

template <typename T, int D, int Rows, bool HasB>
__global__ void __launch_bounds__(kReverseThreads, 1) reverse(const __grid_constant__ ReverseParams params) {
  using Registers = ReverseRegisters<D>;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
  BlockWork work;
  if (!find_work(params.problem.shape, params.grid, blockIdx.x, work)) return;
  const ReverseStorage<T, D, Rows, HasB> storage{shared, params.stages, params.state_stages};
  ReverseBarriers& barriers = storage.barriers();
  barriers.full.init(32 * kLoadWarps, params.stages);
  // The intra-chunk warps do not arrive: the state warps wait for their du_local_full before they arrive, and
  // du_local_full follows the last use of K and the factors.
  barriers.empty.init(arrival_count(kReverseStateWarps), params.stages);
  barriers.query_full.init(32 * kLoadWarps, params.stages);
  barriers.query_factors_full.init(arrival_count(kReverseIntraChunkWarps), params.stages);
  barriers.query_empty.init(arrival_count(kReverseStateWarps + kReverseIntraChunkWarps), params.stages);
  barriers.du_local_full.init(arrival_count(kReverseIntraChunkWarps));
  barriers.du_local_empty.init(arrival_count(kReverseStateWarps));
  barriers.state_full.init(arrival_count(kReverseStateWarps), params.state_stages);
  barriers.state_empty.init(arrival_count(kReverseStoreWarps), params.state_stages);
  barriers.dz_full.init(arrival_count(kReverseStateWarps), params.state_stages);
  barriers.dz_empty.init(arrival_count(kReverseStoreWarps), params.state_stages);
  __syncthreads();
  // The order of the roles: state warps, intra-chunk warps, store warps, load warps.
  const int warp = warp_index(), intra_chunk_warp = warp - kReverseStateWarps,
            store_warp = intra_chunk_warp - kReverseIntraChunkWarps;
  if (intra_chunk_warp < 0) {
    setmaxnreg_inc<Registers::kState>();
    run_reverse_state_warps(params, work, storage, warp);
  } else if (store_warp < 0) {
    setmaxnreg_dec<Registers::kIntraChunk>();
    run_reverse_intra_chunk_warps(params, work, storage, intra_chunk_warp);
  } else {
    setmaxnreg_dec<Registers::kOther>();
    if (store_warp >= kReverseStoreWarps) {
      run_reverse_load_warps(params, work, storage, threadIdx.x - (kReverseThreads - 32 * kLoadWarps));
    } else if (!params.grid.is_local) {
      run_reverse_store_warps(params, work, storage, store_warp);
    }
  }
}

template <typename T, int D, int Rows, bool HasB>
cudaError_t launch_reverse_instance(ReverseParams params, cudaStream_t stream) {
  using Storage = ReverseStorage<T, D, Rows, HasB>;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  // Stages of keys and of query heads that fit beside the stages of dS and dz. Two stages of dS and dz need
  // at least two of keys beside them.
  const auto stages_beside = [&](int state_stages) {
    return fit_stages(limit, kReverseStages,
                      [&](int stages) { return Storage::bytes(stages, state_stages); });
  };
  params.state_stages = params.grid.is_local                      ? 0
                        : stages_beside(kReverseStateStages) >= 2 ? kReverseStateStages
                                                                  : 1;
  params.stages = stages_beside(params.state_stages);
  if (params.stages < 1) return cudaErrorInvalidConfiguration;
  const int bytes = Storage::bytes(params.stages, params.state_stages);
  return launch_kernel<reverse<T, D, Rows, HasB>>(params, block_count(params.problem.shape, params.grid),
                                                  kReverseThreads, bytes, stream, limit);
}

template <typename T, int D, bool HasB>
cudaError_t launch_reverse_by_rows(const ReverseParams& params, cudaStream_t stream) {
  return has_many_tokens(delta_chunk_tokens(params.problem.shape.n))
             ? launch_reverse_instance<T, D, kDeltaChunkRows, HasB>(params, stream)
             : launch_reverse_instance<T, D, kDeltaChunkRows / 2, HasB>(params, stream);
}
template <typename T, int D>
cudaError_t launch_reverse(const ReverseParams& params, cudaStream_t stream) {
  if (params.problem.b.data == nullptr) return launch_reverse_by_rows<T, D, false>(params, stream);
  if constexpr (D <= kDeltaChannelBetaMaxWidth) return launch_reverse_by_rows<T, D, true>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels::delta_product

// reverse: the gradient of the state, chunks from the last to the first. dS is the gradient of the state
// after the chunk.
//
//     dU_j = sum_t P_tj do_t + w_j dS^T k_j        G = X^T dU
//     dS <- e^{L_C} dS + sum_t r_t q_t do_t^T - sum_i k_i read_i G_i^T
//
// The products mirror those of the scan. A block has a warpgroup of state warps with dS^T in registers, a
// producer warpgroup that computes P and sum_t P_tj do_t ahead, two store warps for dS and G, and two load
// warps. The query heads of a memory head use consecutive stages.
#pragma once

#include "delta_product/reverse_producer_warps.cuh"
#include "delta_product/reverse_state_warps.cuh"

namespace girih::kernels::delta_product {

// Store warps: dS and G, or dv.
template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void run_reverse_store_warps(const ReverseParams& params, const BlockWork& work,
                                               const ReverseStorage<T, D, Rows, ReadKeys>& space,
                                               int warp_of_role) {
  const DeltaReverse& p = params.scan;
  const int n = p.shape.n, tokens = delta_chunk_tokens(n), cols = p.shape.V - work.col;
  ReverseBarriers& barriers = space.barriers();
  PipelineState state_pipe;
#pragma unroll 1
  for (int c = work.chunks - 1; c >= 0; --c) {
    T* const gradients =
        state_at(static_cast<T*>(p.gradients), p.shape, work.first_chunk + c, work.head, work.col);
    wait(&barriers.state_full[state_pipe.stage], state_pipe.phase);
    store_rows<kReverseStoreWarps>(space.state(state_pipe.stage), gradients, p.shape.D, cols, p.shape.D,
                                   warp_of_role);
    arrive_warp(&barriers.state_empty[state_pipe.stage]);
    T* const dz =
        at<T>(p.dz, work.range.sequence.batch, (work.range.start + c * tokens) * n, work.head, work.col);
    wait(&barriers.update_full[state_pipe.stage], state_pipe.phase);
    store_rows<kReverseStoreWarps>(space.update(state_pipe.stage), dz, p.dz.stride[1],
                                   chunk_length(work, tokens, c) * n, cols, warp_of_role);
    arrive_warp(&barriers.update_empty[state_pipe.stage]);
    state_pipe.next(params.state_stages);
  }
}

// Registers of a thread by role.
template <int D>
struct ReverseRegisters {
  static constexpr int kState = D == 256 ? 240 : 216, kProducer = D == 256 ? 152 : 168,
                       kOther = 504 - kState - kProducer;
};

template <typename T, int D, int Rows, bool ReadKeys>
__global__ void __launch_bounds__(kReverseThreads, 1) reverse(const __grid_constant__ ReverseParams params) {
  using Registers = ReverseRegisters<D>;
  static_assert(Registers::kState + Registers::kProducer + Registers::kOther <=
                launch_registers(kReverseThreads));
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
  BlockWork work;
  if (!find_work(params.scan.shape, params.grid, blockIdx.x, work)) return;
  const ReverseStorage<T, D, Rows, ReadKeys> space{shared, params.stages, params.state_stages};
  if (threadIdx.x == 0) {
    ReverseBarriers& barriers = space.barriers();
    for (int i = 0; i < params.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoadWarps);
      init_barrier(&barriers.empty[i], arrival_count(kReverseStateWarps));
      init_barrier(&barriers.query_full[i], 32 * kLoadWarps);
      init_barrier(&barriers.query_factors_full[i], arrival_count(kReverseProducerWarps));
      init_barrier(&barriers.query_empty[i], arrival_count(kReverseStateWarps + kReverseProducerWarps));
    }
    for (int i = 0; i < kReverseDuStages; ++i) {
      init_barrier(&barriers.du_full[i], arrival_count(kReverseProducerWarps));
      init_barrier(&barriers.du_empty[i], arrival_count(kReverseStateWarps));
    }
    for (int i = 0; i < params.state_stages; ++i) {
      init_barrier(&barriers.state_full[i], arrival_count(kReverseStateWarps));
      init_barrier(&barriers.state_empty[i], arrival_count(kReverseStoreWarps));
      init_barrier(&barriers.update_full[i], arrival_count(kReverseStateWarps));
      init_barrier(&barriers.update_empty[i], arrival_count(kReverseStoreWarps));
    }
  }
  __syncthreads();
  const int warp = warp_index(), producer = warp - kReverseStateWarps,
            warp_of_role = producer - kReverseProducerWarps;
  if (producer < 0) {
    setmaxnreg_inc<Registers::kState>();
    run_reverse_state_warps(params, work, space, warp);
  } else if (warp_of_role < 0) {
    setmaxnreg_dec<Registers::kProducer>();
    run_reverse_producer_warps(params, work, space, producer);
  } else {
    setmaxnreg_dec<Registers::kOther>();
    if (warp_of_role >= kReverseStoreWarps) {
      run_reverse_load_warps(params, work, space, threadIdx.x - (kReverseThreads - 32 * kLoadWarps));
    } else if (!params.grid.is_local) {
      run_reverse_store_warps(params, work, space, warp_of_role);
    }
  }
}

template <typename T, int D, int Rows, bool ReadKeys>
cudaError_t launch_reverse_instance(ReverseParams params, cudaStream_t stream) {
  using Storage = ReverseStorage<T, D, Rows, ReadKeys>;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const auto stages_beside = [&](int state_stages) {
    return std::min((limit - Storage::bytes(0, state_stages)) / Storage::kStageBytes, kReverseStages);
  };
  params.state_stages = params.grid.is_local                      ? 0
                        : stages_beside(kReverseStateStages) >= 2 ? kReverseStateStages
                                                                  : 1;
  params.stages = stages_beside(params.state_stages);
  if (params.stages < 1) return cudaErrorInvalidConfiguration;
  const int bytes = Storage::bytes(params.stages, params.state_stages);
  return launch_kernel<reverse<T, D, Rows, ReadKeys>>(params, block_count(params.scan.shape, params.grid),
                                                      kReverseThreads, bytes, stream, limit);
}

template <typename T, int D, bool ReadKeys>
cudaError_t launch_reverse_by_rows(const ReverseParams& params, cudaStream_t stream) {
  return has_many_tokens(delta_chunk_tokens(params.scan.shape.n))
             ? launch_reverse_instance<T, D, kDeltaChunkRows, ReadKeys>(params, stream)
             : launch_reverse_instance<T, D, kDeltaChunkRows / 2, ReadKeys>(params, stream);
}
template <typename T, int D>
cudaError_t launch_reverse(const ReverseParams& params, cudaStream_t stream) {
  if (params.scan.b.data == nullptr) return launch_reverse_by_rows<T, D, false>(params, stream);
  if constexpr (D <= kDeltaChannelBetaMaxWidth) return launch_reverse_by_rows<T, D, true>(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels::delta_product

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

#include "delta_product/reverse_chain.cuh"
#include "delta_product/reverse_makers.cuh"

namespace girih::kernels::delta_product {

// Store warps: dS and G, or dv.
template <typename T, int D, int Rows, bool ReadKeys>
__device__ inline void store(const ReversePass& pass, const Part& part,
                             const ReverseSpace<T, D, Rows, ReadKeys>& space, int worker) {
  const DeltaReverse& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n), cols = p.shape.V - part.col;
  ReverseBarriers& barriers = space.barriers();
  Turn slot;
#pragma unroll 1
  for (int c = part.chunks - 1; c >= 0; --c) {
    T* const gradients = state_at(static_cast<T*>(p.gradients), p.shape, part.chunk + c, part.head, part.col);
    wait(&barriers.state[slot.place], slot.parity);
    store_rows<kReverseStores>(space.state(slot.place), gradients, p.shape.D, cols, p.shape.D, worker);
    arrive_once(&barriers.state_stored[slot.place]);
    T* const dz =
        at<T>(p.dz, part.piece.sequence.batch, (part.piece.start + c * tokens) * n, part.head, part.col);
    wait(&barriers.update[slot.place], slot.parity);
    store_rows<kReverseStores>(space.update(slot.place), dz, p.dz.stride[1], tokens_in(part, tokens, c) * n,
                               cols, worker);
    arrive_once(&barriers.update_stored[slot.place]);
    slot.next(pass.slots);
  }
}

// Registers of a thread by role.
template <int D>
struct ReverseRegisters {
  static constexpr int kChain = D == 256 ? 240 : 216, kMakers = D == 256 ? 152 : 168,
                       kOthers = 504 - kChain - kMakers;
};

template <typename T, int D, int Rows, bool ReadKeys>
__global__ void __launch_bounds__(kReverseThreads, 1) reverse(const __grid_constant__ ReversePass pass) {
  using Registers = ReverseRegisters<D>;
  static_assert(Registers::kChain + Registers::kMakers + Registers::kOthers <= registers_of(kReverseThreads));
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of(pass.scan.shape, pass.walk, blockIdx.x, part)) return;
  const ReverseSpace<T, D, Rows, ReadKeys> space{shared, pass.stages, pass.slots};
  if (threadIdx.x == 0) {
    ReverseBarriers& barriers = space.barriers();
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.empty[i], once(kReverseChain));
      init_barrier(&barriers.query_full[i], 32 * kLoaders);
      init_barrier(&barriers.query_ready[i], once(kReverseMakers));
      init_barrier(&barriers.query_empty[i], once(kReverseChain + kReverseMakers));
    }
    for (int i = 0; i < kReverseMade; ++i) {
      init_barrier(&barriers.made[i], once(kReverseMakers));
      init_barrier(&barriers.used[i], once(kReverseChain));
    }
    for (int i = 0; i < pass.slots; ++i) {
      init_barrier(&barriers.state[i], once(kReverseChain));
      init_barrier(&barriers.state_stored[i], once(kReverseStores));
      init_barrier(&barriers.update[i], once(kReverseChain));
      init_barrier(&barriers.update_stored[i], once(kReverseStores));
    }
  }
  __syncthreads();
  const int warp = warp_index(), maker = warp - kReverseChain, worker = maker - kReverseMakers;
  if (maker < 0) {
    take_registers<Registers::kChain>();
    run_reverse_chain(pass, part, space, warp);
  } else if (worker < 0) {
    leave_registers<Registers::kMakers>();
    make_given(pass, part, space, maker);
  } else {
    leave_registers<Registers::kOthers>();
    if (worker >= kReverseStores) {
      load_reverse(pass, part, space, threadIdx.x - (kReverseThreads - 32 * kLoaders));
    } else if (!pass.walk.alone) {
      store(pass, part, space, worker);
    }
  }
}

template <typename T, int D, int Rows, bool ReadKeys>
cudaError_t launch_reverse_of(ReversePass pass, cudaStream_t stream) {
  using Space = ReverseSpace<T, D, Rows, ReadKeys>;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const auto stages_beside = [&](int slots) {
    return std::min((limit - Space::bytes(0, slots)) / Space::kStageBytes, kReverseStages);
  };
  pass.slots = pass.walk.alone ? 0 : stages_beside(kReverseSlots) >= 2 ? kReverseSlots : 1;
  pass.stages = stages_beside(pass.slots);
  if (pass.stages < 1) return cudaErrorInvalidConfiguration;
  const int bytes = Space::bytes(pass.stages, pass.slots);
  return launch_kernel<reverse<T, D, Rows, ReadKeys>>(pass, blocks_of(pass.scan.shape, pass.walk),
                                                      kReverseThreads, bytes, stream, limit);
}

template <typename T, int D, bool ReadKeys>
cudaError_t launch_reverse_by_rows(const ReversePass& pass, cudaStream_t stream) {
  return has_many(delta_chunk(pass.scan.shape.n))
             ? launch_reverse_of<T, D, kDeltaRows, ReadKeys>(pass, stream)
             : launch_reverse_of<T, D, kDeltaRows / 2, ReadKeys>(pass, stream);
}
template <typename T, int D>
cudaError_t launch_reverse(const ReversePass& pass, cudaStream_t stream) {
  if (pass.scan.b.data == nullptr) return launch_reverse_by_rows<T, D, false>(pass, stream);
  if constexpr (D <= kDeltaVectorMaxWidth) return launch_reverse_by_rows<T, D, true>(pass, stream);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels::delta_product

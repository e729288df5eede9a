// The scan's kernel: from chunk to chunk
//
//     Y = K S        Z_i = beta_i v_i - read_i Y_i        U = X Z        S <- e^{L_C} S + K^T (w * U)
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j          S the state before the chunk
//
// A block has 64 columns of V of one head's state, for all chunks of a sequence or a segment of one. The time
// of a chunk is that of its chain of products, each of which waits for the one before: a warpgroup does
// nothing but these. Beside it one or two warpgroups make the output, a warp stores the states, two load
// keys, values and what has been prepared, and one says when they are there.
#pragma once

#include "delta_product/scan_chain.cuh"
#include "delta_product/scan_readers.cuh"

namespace girih::kernels::delta_product {

template <typename T, int D, int Rows>
__device__ inline void load_stages(const ScanPass& pass, const Part& part, const ScanSpace<T, D, Rows>& space,
                                   int thread) {
  const DeltaScan& p = pass.scan;
  const int n = p.shape.n, tokens = delta_chunk(n);
  ScanBarriers& barriers = space.barriers();
  const auto loader = stage_loader<T, D>(p.shape, p.k, p.v, part, thread);
  Turn turn;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    wait(&barriers.empty[turn.place], turn.parity ^ 1);
    loader.start(space.stage(turn.place), c * tokens * n, tokens_in(part, tokens, c) * n, !part.transition,
                 prepared_at(p.prepared, p.shape, part.chunk + c, part.head));
    arrive_after_copies(&barriers.full[turn.place]);
    turn.next(pass.stages);
  }
  commit_copies();
  wait_copies<0>();
}

template <typename T, int D, int Rows>
__device__ inline void store_states(const ScanPass& pass, const Part& part,
                                    const ScanSpace<T, D, Rows>& space) {
  const DeltaScan& p = pass.scan;
  if (p.states == nullptr) return;
  ScanBarriers& barriers = space.barriers();
  Turn slot;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    T* const to = state_at(static_cast<T*>(p.states), p.shape, part.chunk + c, part.head, part.col);
    wait(&barriers.state[slot.place], slot.parity);
    store_rows<1>(space.state(slot.place), to, p.shape.D, p.shape.V - part.col, p.shape.D, 0);
    arrive(&barriers.read[slot.place]);
    slot.next(pass.slots);
  }
}

// What the loaders bring is the products' once a fence has passed: a tenth of the chain's time where its own
// warps had to wait for it.
template <typename T, int D, int Rows>
__device__ inline void fence_stages(const ScanPass& pass, const Part& part,
                                    const ScanSpace<T, D, Rows>& space) {
  ScanBarriers& barriers = space.barriers();
  Turn turn;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    wait(&barriers.full[turn.place], turn.parity);
    fence_tiles();
    arrive(&barriers.ready[turn.place]);
    turn.next(pass.stages);
  }
}

// Of a thread, by role: the chain's states need more than its share of a multiprocessor.
template <int D>
struct ScanRegisters;
template <>
struct ScanRegisters<64> {
  static constexpr int kChain = 168, kReaders = 128, kOthers = 88;
};
template <>
struct ScanRegisters<128> {
  static constexpr int kChain = 184, kReaders = 128, kOthers = 72;
};
template <>
struct ScanRegisters<256> {
  static constexpr int kChain = 240, kReaders = 168, kOthers = 96;
};

template <typename T, int D, int Rows>
__global__ void __launch_bounds__(ScanRoles<D, Rows>::kThreads, 1)
    scan(const __grid_constant__ ScanPass pass) {
  using Roles = ScanRoles<D, Rows>;
  using Space = ScanSpace<T, D, Rows>;
  using Registers = ScanRegisters<D>;
  // Warpgroups of the chain, of readers, and of all others: no more than they have at the start.
  static_assert(Rows == 0 || Registers::kChain + Roles::kReaders * Registers::kReaders + Registers::kOthers <=
                                 Roles::kThreads / 128 * (65536 / Roles::kThreads / 8 * 8));
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of(pass.scan.shape, pass.walk, part)) return;
  const Space space{shared, pass.stages, pass.slots};
  if (threadIdx.x == 0) {
    ScanBarriers& barriers = space.barriers();
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.ready[i], 32);
      init_barrier(&barriers.empty[i], 32 * (Roles::kChain + Roles::kReader));
    }
    for (int i = 0; i < pass.slots; ++i) {
      init_barrier(&barriers.state[i], 32 * Roles::kChain);
      init_barrier(&barriers.update[i], 32 * Roles::kChain);
      init_barrier(&barriers.read[i],
                   32 * (Roles::kReader + (pass.scan.states == nullptr ? 0 : Roles::kStores)));
    }
  }
  __syncthreads();
  const int warp = warp_index();
  if (warp < Roles::kChain) {
    if (Rows != 0) take_registers<Registers::kChain>();
    run_chain<T, D, Rows>(pass, part, space, warp);
    return;
  }
  if constexpr (Rows != 0) {
    const int reader = warp - Roles::kChain, other = reader - Roles::kReaders * Roles::kReader;
    if (other < 0) {  // with as many as at the start
      return run_readers(pass, part, space, reader / Roles::kReader, reader % Roles::kReader);
    }
    leave_registers<Registers::kOthers>();
    if (other == 0) return store_states(pass, part, space);
    if (other == 1) return fence_stages(pass, part, space);
  }
  load_stages(pass, part, space, threadIdx.x - (Roles::kThreads - 32 * kLoaders));
}

// Bytes of shared memory without which a block does not run.
template <typename T, int D>
constexpr int scan_least() {
  return ScanSpace<T, D, kDeltaRows>::bytes(1, 1);
}

template <typename T, int D, int Rows>
cudaError_t launch_scan_of(const ScanPass& given, cudaStream_t stream) {
  using Space = ScanSpace<T, D, Rows>;
  ScanPass pass = given;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (Rows == 0) {
    // Several blocks fit a multiprocessor, if they leave each other shared memory.
    pass.stages = std::min((limit - Space::bytes(0, 0)) / Stage<T, D>::kBytes, 3);
    pass.slots = 0;
  } else {
    // As many stages as there is room for. Two slots beside three of them are better than one beside more.
    const auto fit = [&](int slots) {
      pass.slots = slots;
      for (pass.stages = kMaxStages; pass.stages > 0; --pass.stages) {
        if (Space::bytes(pass.stages, slots) <= limit) break;
      }
      return pass.stages;
    };
    if (const int stages = fit(kMaxSlots); stages < 3 && fit(1) <= stages) fit(stages > 0 ? kMaxSlots : 1);
    // A reader that skips a turn needs another place for it.
    pass.readers = std::min({ScanRoles<D, Rows>::kReaders, pass.stages, pass.slots});
  }
  if (pass.stages < 1 || Space::bytes(pass.stages, pass.slots) > limit) {
    return cudaErrorInvalidConfiguration;
  }
  if (const cudaError_t error = allow_shared<scan<T, D, Rows>>(limit); error != cudaSuccess) return error;
  const int64_t blocks = blocks_of(pass.scan.shape, pass.walk);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const int bytes = Space::bytes(pass.stages, pass.slots);
  scan<T, D, Rows><<<static_cast<unsigned>(blocks), ScanRoles<D, Rows>::kThreads, bytes, stream>>>(pass);
  return cudaGetLastError();
}

template <typename T, int D>
cudaError_t launch_scan(const ScanPass& pass, cudaStream_t stream) {
  if (pass.walk.alone) return launch_scan_of<T, D, 0>(pass, stream);
  return has_many(delta_chunk(pass.scan.shape.n)) ? launch_scan_of<T, D, kDeltaRows>(pass, stream)
                                                  : launch_scan_of<T, D, kDeltaRows / 2>(pass, stream);
}

}  // namespace girih::kernels::delta_product

// The scan by a cluster of two blocks, if the GPU has two multiprocessors for each. Block 0 has the state
// warps, block 1 has three output warpgroups instead of two: the warps that hold the state in block 0 compute
// output in block 1. In one block both roles compete for the tensor cores and for instruction issue (a chunk
// of 4 x 4096 tokens, 16 heads of 64: 0.84 us instead of 1.10). With two output warpgroups the state warps
// would wait for an eighth of their time.
#pragma once

#include "delta_product/scan_chain.cuh"
#include "delta_product/scan_half_readers.cuh"
#include "delta_product/scan_readers.cuh"
#include "delta_product/scan_roles.cuh"
#include "pipe/clusters.h"

namespace girih::kernels::delta_product {

constexpr int kApartReaders = 3;
static_assert(kApartReaders <= kMaxStages && kApartReaders <= kMaxSlots, "a place for each");

// A warp of block 0 copies S and U to block 1 as soon as they are stored.
template <typename T, int D, int Rows>
__device__ inline void send_slots(const Part& part, int slots, const ScanSpace<T, D, Rows>& space) {
  using Space = ScanSpace<T, D, Rows>;
  ScanBarriers& barriers = space.barriers();
  Turn slot;
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    wait(&barriers.state[slot.place], slot.parity);
    if (lane() == 0) send(space.state(slot.place).data, Space::State::kBytes, &barriers.state[slot.place], 1);
    __syncwarp();
    wait(&barriers.update[slot.place], slot.parity);
    __syncwarp();  // the stage may be refilled after the copy, so all lanes must have seen this phase
    if (lane() == 0)
      send(space.update(slot.place).data, Space::Update::kBytes, &barriers.update[slot.place], 1);
    __syncwarp();
    slot.next(slots);
  }
}

// Selects the role of a warp in either block.
template <typename T, int D, int Rows>
__device__ inline void run_apart(const ScanPass& pass, const Part& part, const ScanSpace<T, D, Rows>& space,
                                 bool reads) {
  using Roles = ScanRoles<D, Rows>;
  using Registers = ScanRegisters<D, Rows>;
  const int warp = warp_index(), other = warp - Roles::kChain - Roles::kReaders * Roles::kReader;
  if (warp < Roles::kChain && !reads) {
    take_registers<Registers::kChain>();
    return run_chain(pass, part, space, 0, warp);
  }
  if (other < 0) {
    static_assert(kApartReaders * Roles::kReader == Roles::kChain + Roles::kReaders * Roles::kReader);
    static_assert(kApartReaders * Registers::kReaders + Registers::kOthers <= registers_of(Roles::kThreads));
    const int reader = warp / Roles::kReader, its_warp = warp % Roles::kReader;
    leave_registers<Registers::kReaders>();
    if (!reads) {
      if (warp == Roles::kChain) send_slots(part, pass.slots, space);
      return;
    }
    if constexpr (Rows == ScanSpace<T, D, Rows>::kTokens) {
      return run_half_readers<true>(pass, part, space, reader, its_warp);
    } else {
      return run_readers<true>(pass, part, space, reader, its_warp);
    }
  }
  leave_registers<Registers::kOthers>();
  if (other == 0) {
    if (!reads) store_states<T>(pass, part, space);
  } else if (other == 1) {
    fence_stages(pass, part, space);
  } else {
    load_stages<T, D>(pass, part, space, !reads, threadIdx.x - (Roles::kThreads - 32 * kLoaders));
  }
}

template <typename T, int D, int Rows>
__global__ void __launch_bounds__(ScanRoles<D, Rows>::kThreads, 1)
    scan_apart(const __grid_constant__ ScanPass pass) {
  using Roles = ScanRoles<D, Rows>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Part part;
  if (!part_of(pass.scan.shape, pass.walk, blockIdx.x / 2, part)) return;
  const bool reads = cluster_rank() == 1;
  const ScanSpace<T, D, Rows> space{shared, pass.stages, pass.slots, pass.readers};
  if (threadIdx.x == 0) {
    ScanBarriers& barriers = space.barriers();
    for (int i = 0; i < pass.stages; ++i) {
      init_barrier(&barriers.full[i], 32 * kLoaders);
      init_barrier(&barriers.ready[i], once(1));
      init_barrier(&barriers.empty[i], once(reads ? Roles::kReader : Roles::kChain));
    }
    for (int i = 0; i < pass.slots; ++i) {
      init_barrier(&barriers.state[i], reads ? 1 : once(Roles::kChain));
      init_barrier(&barriers.update[i], reads ? 1 : once(Roles::kChain));
      init_barrier(&barriers.read[i],
                   Roles::kReader + (pass.scan.states == nullptr ? 0 : once(Roles::kStores)));
    }
    publish_barriers();
  }
  cluster_wait();
  run_apart(pass, part, space, reads);
  // A block must not exit while the other block accesses its shared memory.
  cluster_wait();
}

template <typename T, int D, int Rows>
cudaError_t launch_apart(ScanPass pass, int64_t blocks, int limit, cudaStream_t stream) {
  using Space = ScanSpace<T, D, Rows>;
  // Copies may complete out of order. Each stage of states belongs to one output warpgroup, which sees all
  // phases of its barriers.
  pass.slots = pass.readers = kApartReaders;
  constexpr auto kernel = scan_apart<T, D, Rows>;
  if (const cudaError_t error = allow_shared<kernel>(limit); error != cudaSuccess) return error;
  return launch_clusters<kernel>(pass, static_cast<unsigned>(2 * blocks), 2, ScanRoles<D, Rows>::kThreads,
                                 Space::bytes(pass.stages, pass.slots, pass.readers), stream);
}

}  // namespace girih::kernels::delta_product

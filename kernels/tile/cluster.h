// Thread block clusters (sm_90): two blocks on two multiprocessors that access each other's shared memory.
#pragma once

#include "tile/shared.h"

namespace girih::kernels {

#if __CUDA_ARCH__ >= 900

// The rank of the block in its cluster.
__device__ inline int cluster_rank() { return static_cast<int>(ptx::cluster_ctarank()); }

// Synchronises all threads of the cluster that have not exited. Writes before the barrier are visible to all
// threads after the barrier.
__device__ inline void cluster_sync() { ptx::barrier_cluster_sync(); }
// Makes initialised mbarriers visible to the other blocks of the cluster and to TMA (tma.h).
__device__ inline void fence_barrier_init() { ptx::fence_mbarrier_init_cluster(); }

// The address in the shared memory of block `rank` that corresponds to `here` in this block.
__device__ inline uint32_t map_shared_address(const void* here, int rank) {
  return ptx::mapa(shared_address(here), rank);
}

// One arrival of a whole warp at an mbarrier of block `rank`: the other block may overwrite what the warp has
// read. The arrival does not release the writes of the warp. A release at cluster scope waits until all
// writes are complete, which took a third of a reader's time, and invalidates cached data of the other block.
__device__ inline void arrive_remote(const uint64_t* barrier, int rank) {
  __syncwarp();
  ptx::mbarrier_arrive_remote_elected(map_shared_address(barrier, rank));
}

// Called by one thread. Copies `bytes` of this block's shared memory to the same offset in block `rank` and
// arrives at the mbarrier of block `rank`, whose phase also waits for these bytes. The thread has
// synchronised with the writers of the data.
__device__ inline void copy_to_remote(const void* from, int bytes, const uint64_t* barrier, int rank) {
  const uint32_t remote_barrier = map_shared_address(barrier, rank);
  ptx::fence_proxy_async();
  ptx::mbarrier_arrive_expect_tx_remote(remote_barrier, bytes);
  ptx::cp_async_bulk_remote(map_shared_address(from, rank), shared_address(from), bytes, remote_barrier);
}

#else  // never launched

__device__ inline int cluster_rank() { return 0; }
__device__ inline void cluster_sync() {}
__device__ inline void fence_barrier_init() {}
__device__ inline void arrive_remote(const uint64_t*, int) {}
__device__ inline void copy_to_remote(const void*, int, const uint64_t*, int) {}

#endif

}  // namespace girih::kernels

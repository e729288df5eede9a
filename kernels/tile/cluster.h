// Thread block clusters (sm_90): two blocks on two multiprocessors that access each other's shared memory.
#pragma once

#include "tile/shared.h"

namespace girih::kernels {

#if __CUDA_ARCH__ >= 900

// The rank of the block in its cluster.
__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
}

// Synchronises all threads of the cluster that have not exited. Writes before the barrier are visible to all
// threads after the barrier.
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}
// Makes initialised mbarriers visible to the other blocks of the cluster and to TMA (boxes.h).
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// The address in the shared memory of block `rank` that corresponds to `here` in this block.
__device__ inline uint32_t far_address(const void* here, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n"
               : "=r"(address)
               : "r"(shared_address(here)), "r"(rank));
  return address;
}

// One arrival of a whole warp at an mbarrier of block `rank`: the other block may overwrite what the warp has
// read. The arrival does not release the writes of the warp. A release at cluster scope waits until all
// writes are complete, which took a third of a reader's time, and invalidates cached data of the other block.
__device__ inline void arrive_far(const uint64_t* barrier, int rank) {
  __syncwarp();
  asm volatile(
      "{\n.reg .pred first;\nelect.sync _|first, 0xffffffff;\n"
      "@first mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(far_address(barrier, rank))
      : "memory");
}

// Called by one thread. Copies `bytes` of this block's shared memory to the same offset in block `rank` and
// arrives at the mbarrier of block `rank`, whose phase also waits for these bytes. The thread has
// synchronised with the writers of the data.
__device__ inline void send(const void* from, int bytes, const uint64_t* barrier, int rank) {
  const uint32_t far_barrier = far_address(barrier, rank);
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;\n" ::"r"(far_barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
          far_address(from, rank)),
      "r"(shared_address(from)), "r"(bytes), "r"(far_barrier)
      : "memory");
}

#else  // never launched

__device__ inline int cluster_rank() { return 0; }
__device__ inline void cluster_wait() {}
__device__ inline void publish_barriers() {}
__device__ inline void arrive_far(const uint64_t*, int) {}
__device__ inline void send(const void*, int, const uint64_t*, int) {}

#endif

}  // namespace girih::kernels

// Two blocks that run beside each other on two multiprocessors (sm_90) and reach each other's shared memory.
#pragma once

#include "tile/shared.h"

namespace girih::kernels {

#if __CUDA_ARCH__ >= 900

// The block's number in its cluster.
__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
}

// All threads of all its blocks that have not ended: what they wrote before is seen by the others after.
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}
// Barriers made so far are there for the other blocks, and for copies (boxes.h).
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// Where block `rank` has what the block has here.
__device__ inline uint32_t far_address(const void* here, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n"
               : "=r"(address)
               : "r"(shared_address(here)), "r"(rank));
  return address;
}

// One arrival, by all of a warp, at a barrier of block `rank`: what it has read before may change. (It tells
// nothing of what the warp has written: for that it would wait until all of it is out, a third of a reader's
// time, and the other block would drop what it has cached.)
__device__ inline void arrive_far(const uint64_t* barrier, int rank) {
  __syncwarp();
  asm volatile(
      "{\n.reg .pred first;\nelect.sync _|first, 0xffffffff;\n"
      "@first mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(far_address(barrier, rank))
      : "memory");
}

// By one thread: `bytes` of the block's own shared memory, which it has seen written, to the same place of
// block `rank`, and an arrival at its barrier, whose phase waits for them.
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

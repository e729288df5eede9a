// scan_short.cuh with a cluster of two blocks, for devices that have two multiprocessors for each sequence
// and head. Each block has producer warps and a ring with the same layout. Block 0 has the state warps, block
// 1 all output warps:
//
//     block 0    loads K, V (`full`); computes S and H of a chunk (`state_full`), which one warp sends to the
//                other block and another warp stores for backward
//     block 1    loads Q, K (`full`); S and H have arrived (`state_full`): computes o
//
// A stage of the state warps' block is empty when its S and H have arrived in the other block and are stored:
// the state warps may be a whole ring ahead of the output warps. S and H may be sent to a stage after the
// output warps have finished its previous chunk (`state_empty`, in block 0).
//
// In a single block the output warps compete with the state warps for issue slots and the instruction cache.
#pragma once

#include "lattice/read_short.cuh"
#include "lattice/scan_short_state_warps.cuh"
#include "pipe/clusters.h"

namespace girih::kernels::lattice {

// Called by one warp of the state warps' block.
template <class Ring>
__device__ inline void send_stages(const Ring& ring) {
  const int64_t chunks = ring.block().of.chunks;
  PipelineState pipe;
#pragma unroll 1
  for (int64_t n = 0; n < chunks; ++n, pipe.next(Ring::kStages)) {
    const int stage = pipe.stage;
    ring.barriers().state_full.wait(pipe);
    ring.barriers().state_empty.wait(pipe);
    __syncwarp();  // all lanes must see this phase before the send lets the stage be filled again
    if (lane() == 0)
      copy_to_remote(ring.memory(stage).data, Ring::kSentBytes, ring.barriers().state_full.at(stage), 1);
    __syncwarp();
  }
}
template <class Ring>
__device__ inline void store_stages(const LatticeScan& p, const Ring& ring) {
  const ChunkedSequence& of = ring.block().of;
  PipelineState pipe;
#pragma unroll 1
  for (int64_t n = 0; n < of.chunks; ++n, pipe.next(Ring::kStages)) {
    ring.barriers().state_full.wait(pipe);
    ring.store_saved(p, of.first + n, pipe.stage);
    ring.barriers().empty.arrive_warp(pipe.stage);
  }
}

template <typename T, LatticeObjective kObjective>
__global__ void __launch_bounds__(ShortScanRing<T, kObjective, true>::kThreads, 1)
    scan_short_cluster_kernel(const __grid_constant__ ShortScanArguments p) {
  using Ring = ShortScanRing<T, kObjective, true>;
  constexpr int kStateWarps = Ring::S::kWarps;
  static_assert(kStateWarps + 2 + Ring::kStateProducerWarps <= Ring::kThreads / 32,
                "state warps, sending, storing");
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const Ring ring{shared};
  const int warp = warp_index();
  const bool reads = cluster_rank() == 1;
  ring.init(p, reads);
  const int producers = reads ? Ring::kProducerWarps : Ring::kStateProducerWarps,
            producer = warp + producers - Ring::kThreads / 32;
  if (producer >= 0) {
    ring.load(p.scan, producer, producers, reads);
    wait_copies<0>();
  } else if (reads) {
    ShortOutputWarp<Ring>(p, ring).run(warp);
  } else if (warp < kStateWarps) {
    ShortScanStateWarp<Ring>(p.scan, ring, warp).run();
  } else if (warp == kStateWarps) {
    send_stages(ring);
  } else if (warp == kStateWarps + 1 && p.scan.memories != nullptr) {
    store_stages(p.scan, ring);
  }
  // The block's shared memory must stay valid until the other block has finished its accesses.
  cluster_sync();
}

// Whether the device has clusters, and two multiprocessors for each sequence and head.
template <typename T, LatticeObjective kObjective>
cudaError_t uses_cluster(const LatticeShape& shape, bool& is) {
  int processors = 0;
  if (const cudaError_t error = processor_count(processors); error != cudaSuccess) return error;
  if (const cudaError_t error = has_clusters<scan_short_cluster_kernel<T, kObjective>>(is);
      error != cudaSuccess) {
    return error;
  }
  is = is && 2 * shape.grid.tokens.sequences * shape.heads <= processors;
  return cudaSuccess;
}

template <typename T, LatticeObjective kObjective>
cudaError_t launch_short_cluster(const ShortScanArguments& p, cudaStream_t stream) {
  using Ring = ShortScanRing<T, kObjective, true>;
  const int64_t blocks = 2 * p.scan.shape.grid.tokens.sequences * p.scan.shape.heads;
  if (blocks == 0) return cudaSuccess;
  constexpr auto kKernel = scan_short_cluster_kernel<T, kObjective>;
  if (const cudaError_t error = allow_shared<kKernel>(Ring::kBytes); error != cudaSuccess) return error;
  return launch_clusters<kKernel>(p, static_cast<unsigned>(blocks), 2, Ring::kThreads, Ring::kBytes, stream);
}

}  // namespace girih::kernels::lattice

// scan.cuh and read.cuh in one kernel, for chunks of at most 16 tokens and memories of at most 64 x 64. A
// block has a sequence and head. Roles of its warps:
//
//     state     computes S and H of a chunk, and the next memory, chunk by chunk (scan_short_state_warps.cuh)
//     producers load Q, K, V, gates and steps
//     output    compute o and store what backward needs, one warp for each chunk (read_short.cuh)
//
// If half of the multiprocessors would be idle, two blocks share these roles (scan_short_cluster.cuh).
#pragma once

#include "lattice/scan_short_cluster.cuh"

namespace girih::kernels::lattice {

template <typename T, LatticeObjective kObjective>
__global__ void __launch_bounds__(ShortScanRing<T, kObjective, false>::kThreads, 1)
    scan_short_kernel(const __grid_constant__ ShortScanArguments p) {
  using Ring = ShortScanRing<T, kObjective, false>;
  constexpr int kStateWarps = Ring::S::kWarps;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const Ring ring{shared};
  const int warp = warp_index();
  ring.init(p, true);
  // The order of the branches is the order of their code. With other orders the loops of several roles share
  // lines of the instruction cache (row_source.h), and the state warps are up to 10% slower.
  if (warp >= kStateWarps + Ring::kProducerWarps) {
    ShortOutputWarp<Ring>(p, ring).run(warp - kStateWarps - Ring::kProducerWarps);
  } else if (warp >= kStateWarps) {
    ring.load(p.scan, warp - kStateWarps, Ring::kProducerWarps, true);
    wait_copies<0>();
  } else {
    ShortScanStateWarp<Ring>(p.scan, ring, warp).run();
  }
}

template <typename T, LatticeObjective kObjective>
cudaError_t launch_objective(const ShortScanArguments& p, cudaStream_t stream) {
  using Ring = ShortScanRing<T, kObjective, false>;
  bool has_cluster = false;
  GIRIH_TRY(uses_cluster<T, kObjective>(p.scan.shape, has_cluster));
  if (has_cluster) return launch_short_cluster<T, kObjective>(p, stream);
  return launch_sequences<scan_short_kernel<T, kObjective>>(p, Ring::kThreads, Ring::kBytes, p.scan.shape,
                                                            stream);
}

template <typename T>
cudaError_t launch_short_scan(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream) {
  return dispatch_objective(scan.shape, [&](auto objective) {
    return launch_objective<T, decltype(objective)::value>(ShortScanArguments{scan, read}, stream);
  });
}

}  // namespace girih::kernels::lattice

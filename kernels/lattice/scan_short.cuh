// scan.cuh and read.cuh in one kernel, for chunks of at most 16 tokens and memories of at most 64 x 64. A
// block has a sequence and head. Roles of its warps:
//
//     state     computes S and H of a chunk, and the next memory, chunk by chunk (scan_short_state_warps.cuh)
//     producers load Q, K, V, gates and steps
//     output    compute o and store what backward needs, one warp for each chunk (read_short.cuh)
//
// If half of the multiprocessors would be idle, two blocks share these roles (scan_short_cluster.cuh).
#pragma once

#include "lattice/scan.cuh"
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
cudaError_t launch_short(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream) {
  using Ring = ShortScanRing<T, kObjective, false>;
  bool has_cluster = false;
  if (const cudaError_t error = uses_cluster<T, kObjective>(scan.shape, has_cluster); error != cudaSuccess) {
    return error;
  }
  if (has_cluster) return launch_short_cluster<T, kObjective>(ShortScanArguments{scan, read}, stream);
  return launch_scan<scan_short_kernel<T, kObjective>>(ShortScanArguments{scan, read}, Ring::kThreads,
                                                       Ring::kBytes, scan.shape, stream);
}

template <typename T>
cudaError_t launch_forward(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream) {
  bool is = false;
  if (const cudaError_t error = uses_short_scan(scan.shape, is); error != cudaSuccess) return error;
  if (is) {
    return dispatch_objective(scan.shape, [&](auto objective) {
      return launch_short<T, decltype(objective)::value>(scan, read, stream);
    });
  }
  const cudaError_t error = dispatch_size(scan.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    return launch_scan<scan_kernel<S>>(scan, Ring<S>::kThreads, ScanStorage<S>::kBytes, scan.shape, stream);
  });
  return error == cudaSuccess ? launch_read<T>(read, stream) : error;
}

}  // namespace girih::kernels::lattice

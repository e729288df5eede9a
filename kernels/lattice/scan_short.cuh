// scan.cuh and read.cuh in one kernel, for chunks of at most 16 tokens and memories of at most 64 x 64. A
// block has a sequence and head. Roles of its warps:
//
//     state     computes S and H of a chunk, and the next memory, chunk by chunk (scan_short_chain.cuh)
//     producers load Q, K, V, gates and steps
//     output    compute o and store what backward needs, one warp for each chunk (read_short.cuh)
//
// If half of the multiprocessors would be idle, two blocks share these roles (scan_short_apart.cuh).
#pragma once

#include "lattice/scan.cuh"
#include "lattice/scan_short_apart.cuh"

namespace girih::kernels::lattice {

template <typename T, LatticeObjective kObjective>
__global__ void __launch_bounds__(ShortScanRing<T, kObjective, false>::kThreads, 1)
    scan_short_kernel(const __grid_constant__ ShortScan p) {
  using Ring = ShortScanRing<T, kObjective, false>;
  constexpr int kChain = Ring::S::kWarps;
  extern __shared__ __align__(128) unsigned char shared[];
  const Ring ring{shared};
  const int warp = warp_index();
  ring.start(p, true);
  // The order of the branches is the order of their code. With other orders the loops of several roles share
  // lines of the instruction cache (row_source.h), and the state warps are up to 10% slower.
  if (warp >= kChain + Ring::kLoaders) {
    ShortReader<Ring>(p, ring).run(warp - kChain - Ring::kLoaders);
  } else if (warp >= kChain) {
    ring.load(p.scan, warp - kChain, Ring::kLoaders, true);
    wait_copies<0>();
  } else {
    ShortScanChain<Ring>(p.scan, ring, warp).run();
  }
}

template <typename T, LatticeObjective kObjective>
cudaError_t launch_short(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream) {
  using Ring = ShortScanRing<T, kObjective, false>;
  bool apart = false;
  if (const cudaError_t error = is_apart<T, kObjective>(scan.shape, apart); error != cudaSuccess) {
    return error;
  }
  if (apart) return launch_apart<T, kObjective>(ShortScan{scan, read}, stream);
  return launch_scan<scan_short_kernel<T, kObjective>>(ShortScan{scan, read}, Ring::kThreads, Ring::kBytes,
                                                       scan.shape, stream);
}

template <typename T>
cudaError_t forward_of(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream) {
  bool is = false;
  if (const cudaError_t error = is_short(scan.shape, is); error != cudaSuccess) return error;
  if (is) {
    return by_objective(scan.shape, [&](auto objective) {
      return launch_short<T, decltype(objective)::value>(scan, read, stream);
    });
  }
  const cudaError_t error = by_size(scan.shape, [&](auto tokens, auto D, auto M) {
    using S = Sizes<T, tokens(), D(), M()>;
    return launch_scan<scan_kernel<S>>(scan, Ring<S>::kThreads, ScanSpace<S>::kBytes, scan.shape, stream);
  });
  return error == cudaSuccess ? read_of<T>(read, stream) : error;
}

}  // namespace girih::kernels::lattice

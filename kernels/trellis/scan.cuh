// Forward scan: updates the memories chunk by chunk and computes r and o. The grid has one block for each
// sequence, head and memory. With clusters, the blocks of the two memories of a head are a cluster and
// compute o together. A single memory needs no cluster.
#pragma once

#include "pipe/clusters.h"
#include "tile/cluster.h"
#include "tile/warpgroup.h"
#include "trellis/scan_loaders.cuh"
#include "trellis/scan_readers.cuh"
#include "trellis/scan_short_chain.cuh"

namespace girih::kernels {

// Short: a chunk has at most one tile of 16 tokens.
template <typename T, int Tile, class Phi, bool Short>
__global__ void __launch_bounds__(TrellisScanSpace<T, Tile>::kThreads, 1)
    trellis_scan_kernel(const __grid_constant__ TrellisScan p) {
  using Space = TrellisScanSpace<T, Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  const Space space{by_address(shared)};
  const TrellisPart part(p.shape, blockIdx.x);
  const bool paired = has_pairs(p);
  const int warp = warp_index();
  if (threadIdx.x == 0) {
    space.init(p, part, Short ? 1 : Space::kReaders);
    if (paired) publish_barriers();
    if (part.head == 0 && part.memory == 0) {
      const auto& sequence = part.of.sequence;
      p.last_position[part.sequence] = (part.of.begun + sequence.end - sequence.start) % p.shape.grid.size;
    }
  }
  __syncthreads();
  if (paired) cluster_wait();
  // With a tile of 128 the state warps and output warps need the registers that producer warps and the store
  // warp do not use.
  constexpr bool kWide = Tile > 64;
  if (warp < Space::kChain) {
    if (kWide) take_registers<168>();
    using Chain = std::conditional_t<Short, TrellisShortChain<T, Tile, Phi>, TrellisScanChain<T, Tile, Phi>>;
    Chain(p, part, space, warp).run();
  } else if (warp < Space::kChain + Space::kReaders) {
    if (kWide) take_registers<136>();
    TrellisScanReader<T, Tile, Short, Phi::weighted>{p, part, space}.run(warp - Space::kChain);
  } else {
    if (kWide) leave_registers<40>();
    const int loader = warp - Space::kChain - Space::kReaders;
    if (loader < Space::kLoaders) {
      TrellisScanLoader<T, Tile, Short>{p, part, space}.run(loader);
    } else {
      store_scan(p, part, space);
    }
  }
  // The block's shared memory must stay valid until the other block of the cluster has finished its accesses.
  if (paired) cluster_wait();
}

template <auto Kernel, typename T, int Tile, int Bytes>
cudaError_t launch_scan(const TrellisScan& p, cudaStream_t stream) {
  using Space = TrellisScanSpace<T, Tile>;
  if (const cudaError_t error = allow_shared<Kernel>(Bytes); error != cudaSuccess) return error;
  const int64_t blocks = parts_of(p.shape);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  return launch_clusters<Kernel>(p, static_cast<unsigned>(blocks), has_pairs(p) ? 2 : 1, Space::kThreads,
                                 Bytes, stream);
}

template <typename T, int Tile>
cudaError_t scan_reads(bool& reads) {
  return has_clusters<trellis_scan_kernel<T, Tile, Map<false>, false>>(reads);
}

template <typename T, int Tile, class Phi, bool Short>
cudaError_t launch_scan_of(const TrellisScan& p, cudaStream_t stream) {
  using Space = TrellisScanSpace<T, Tile>;
  constexpr int kBytes = Phi::weighted ? Space::kWeightedBytes : Space::kBytes;
  return launch_scan<trellis_scan_kernel<T, Tile, Phi, Short>, T, Tile, kBytes>(p, stream);
}
template <typename T, int Tile>
cudaError_t launch_trellis_scan(const TrellisScan& p, cudaStream_t stream) {
  const TrellisMap& phi = p.shape.phi;
  const bool softmax = phi.norm == Norm::softmax;
  if constexpr (TrellisScanSpace<T, Tile>::kLooksAhead) {
    if (p.shape.grid.size <= kTile) {
      if (softmax) return launch_scan_of<T, Tile, Map<true>, true>(p, stream);
      return phi.silu && phi.norm != Norm::none ? launch_scan_of<T, Tile, NormedSilu, true>(p, stream)
                                                : launch_scan_of<T, Tile, Map<false>, true>(p, stream);
    }
  }
  return softmax ? launch_scan_of<T, Tile, Map<true>, false>(p, stream)
                 : launch_scan_of<T, Tile, Map<false>, false>(p, stream);
}

}  // namespace girih::kernels

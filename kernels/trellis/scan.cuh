// Forward scan: updates the memories chunk by chunk and computes r and o. The grid has one block for each
// sequence, head and memory. With clusters, the blocks of the two memories of a head are a cluster and
// compute o together. A single memory needs no cluster.
#pragma once

#include "pipe/clusters.h"
#include "tile/cluster.h"
#include "tile/warpgroup.h"
#include "trellis/scan_lookahead_state_warps.cuh"
#include "trellis/scan_output_warps.cuh"
#include "trellis/scan_producer_warps.cuh"

namespace girih::kernels {

// HasLookahead: a chunk has at most one tile of 16 tokens, and the state warps compute one chunk ahead.
template <typename T, int Width, class Phi, bool HasLookahead>
__global__ void __launch_bounds__(TrellisScanStorage<T, Width>::kThreads, 1)
    trellis_scan_kernel(const __grid_constant__ TrellisScan p) {
  using Storage = TrellisScanStorage<T, Width>;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const Storage storage{pin_address(shared)};
  const TrellisBlockCoord coord(p.shape, blockIdx.x);
  const bool paired = has_cluster_pair(p);
  const int warp = warp_index();
  storage.init_barriers(p, coord.memory, HasLookahead ? 1 : Storage::kOutputWarps);
  if (paired) fence_barrier_init();
  if (threadIdx.x == 0) {
    storage.init_sources(p, coord);
    if (coord.head == 0 && coord.memory == kKeyMemory) {
      const auto& sequence = coord.chunked.sequence;
      p.last_position[coord.sequence] =
          (coord.chunked.prior_tokens + sequence.end - sequence.start) % p.shape.grid.size;
    }
  }
  __syncthreads();
  if (paired) cluster_sync();
  // With a width of 128 the state warps and output warps need the registers that producer warps and the store
  // warp do not use.
  constexpr bool kUseSetmaxnreg = Width > 64;
  constexpr int kStateRegisters = 168, kOutputRegisters = 136, kOtherRegisters = 40;
  static_assert(!kUseSetmaxnreg ||
                fit_registers(Storage::kThreads, {{Storage::kStateWarps / 4, kStateRegisters},
                                                  {Storage::kOutputWarps / 4, kOutputRegisters},
                                                  {1, kOtherRegisters}}));
  if (warp < Storage::kStateWarps) {
    if (kUseSetmaxnreg) setmaxnreg_inc<kStateRegisters>();
    using StateWarp = std::conditional_t<HasLookahead, TrellisLookaheadScanStateWarp<T, Width, Phi>,
                                         TrellisScanStateWarp<T, Width, Phi>>;
    StateWarp(p, coord, storage, warp).run();
  } else if (warp < Storage::kStateWarps + Storage::kOutputWarps) {
    if (kUseSetmaxnreg) setmaxnreg_inc<kOutputRegisters>();
    TrellisScanOutputWarp<T, Width, HasLookahead, Phi::has_weight>{p, coord, storage}.run(
        warp - Storage::kStateWarps);
  } else {
    if (kUseSetmaxnreg) setmaxnreg_dec<kOtherRegisters>();
    const int producer = warp - Storage::kStateWarps - Storage::kOutputWarps;
    if (producer < Storage::kProducerWarps) {
      TrellisScanProducerWarp<T, Width, HasLookahead>{p, coord, storage}.run(producer);
    } else {
      store_memories(p, coord, storage);
    }
  }
  // The block's shared memory must stay valid until the other block of the cluster has finished its accesses.
  if (paired) cluster_sync();
}

template <auto Kernel, typename T, int Width, int Bytes>
cudaError_t launch_scan(const TrellisScan& p, cudaStream_t stream) {
  using Storage = TrellisScanStorage<T, Width>;
  if (const cudaError_t error = allow_shared<Kernel>(Bytes); error != cudaSuccess) return error;
  const int64_t blocks = memory_block_count(p.shape);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  return launch_clusters<Kernel>(p, static_cast<unsigned>(blocks), has_cluster_pair(p) ? 2 : 1,
                                 Storage::kThreads, Bytes, stream);
}

template <typename T, int Width>
cudaError_t scan_has_output(bool& has_output) {
  return has_clusters<trellis_scan_kernel<T, Width, ActivationMap<false>, false>>(has_output);
}

template <typename T, int Width, class Phi, bool HasLookahead>
cudaError_t launch_scan_instance(const TrellisScan& p, cudaStream_t stream) {
  using Storage = TrellisScanStorage<T, Width>;
  constexpr int kBytes = Phi::has_weight ? Storage::kWeightedBytes : Storage::kBytes;
  return launch_scan<trellis_scan_kernel<T, Width, Phi, HasLookahead>, T, Width, kBytes>(p, stream);
}
template <typename T, int Width>
cudaError_t launch_trellis_scan(const TrellisScan& p, cudaStream_t stream) {
  const TrellisMap& phi = p.shape.phi;
  const bool softmax = phi.norm == Norm::softmax;
  if constexpr (TrellisScanStorage<T, Width>::kHasLookahead) {
    if (p.shape.grid.size <= kTokenTile) {
      if (softmax) return launch_scan_instance<T, Width, ActivationMap<true>, true>(p, stream);
      return phi.silu && phi.norm != Norm::none
                 ? launch_scan_instance<T, Width, SiluNormMap, true>(p, stream)
                 : launch_scan_instance<T, Width, ActivationMap<false>, true>(p, stream);
    }
  }
  return softmax ? launch_scan_instance<T, Width, ActivationMap<true>, false>(p, stream)
                 : launch_scan_instance<T, Width, ActivationMap<false>, false>(p, stream);
}

}  // namespace girih::kernels

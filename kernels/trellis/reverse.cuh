// Reverse scan: computes the gradients of the memories chunk by chunk, from the end, and the gradients of the
// tokens. The grid has one block for each sequence, head and memory.
#pragma once

#include "tile/warpgroup.h"
#include "trellis/reverse_chain.cuh"
#include "trellis/reverse_loaders.cuh"
#include "trellis/reverse_readers.cuh"

namespace girih::kernels {

// Short: a chunk has at most one tile of 16 tokens.
template <typename T, int Tile, class Phi, bool Short>
__global__ void __launch_bounds__(TrellisReverseSpace<T, Tile>::kThreads, 1)
    trellis_reverse_kernel(const __grid_constant__ TrellisReverse p) {
  using Space = TrellisReverseSpace<T, Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  const Space space{Tile == 64 ? by_address(shared) : shared};
  const TrellisPart part(p.shape, blockIdx.x);
  const int warp = warp_index();
  if (threadIdx.x == 0) space.init(p, part, Short ? 1 : Space::kReaders);
  __syncthreads();
  // With a tile of 128 the state warps and the output warps need the registers that producer warps do not
  // use.
  constexpr bool kWide = Tile > 64;
  if (warp < Space::kChain) {
    if (kWide) take_registers<160>();
    run_reverse<T, Tile, Phi, Short>(p, part, space, warp);
  } else if (warp < Space::kChain + Space::kReaders) {
    if (kWide) take_registers<136>();
    TrellisReverseReader<T, Tile, Short>{p, part, space}.run(warp - Space::kChain);
  } else {
    if (kWide) leave_registers<56>();
    const int loader = warp - Space::kChain - Space::kReaders;
    if (loader < Space::kLoaders) {
      TrellisReverseLoader<T, Tile, Short, Phi::weighted>{p, part, space}.run(loader);
    } else {
      bring_memories<T, Tile>(p, part, space);
    }
  }
}

template <typename T, int Tile, class Phi>
cudaError_t launch_reverse_of(const TrellisReverse& p, cudaStream_t stream) {
  using Space = TrellisReverseSpace<T, Tile>;
  constexpr int kBytes = Phi::weighted ? Space::kWeightedBytes : Space::kBytes;
  return p.shape.grid.size <= kTile
             ? launch_parts<trellis_reverse_kernel<T, Tile, Phi, true>, Space, kBytes>(p, stream)
             : launch_parts<trellis_reverse_kernel<T, Tile, Phi, false>, Space, kBytes>(p, stream);
}
template <typename T, int Tile>
cudaError_t launch_trellis_reverse(const TrellisReverse& p, cudaStream_t stream) {
  return p.shape.phi.norm == Norm::softmax ? launch_reverse_of<T, Tile, Map<true>>(p, stream)
                                           : launch_reverse_of<T, Tile, Map<false>>(p, stream);
}

}  // namespace girih::kernels

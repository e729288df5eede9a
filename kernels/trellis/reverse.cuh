// Reverse scan: computes the gradients of the memories chunk by chunk, from the end, and the gradients of the
// tokens. The grid has one block for each sequence, head and memory.
#pragma once

#include "tile/warpgroup.h"
#include "trellis/reverse_output_warps.cuh"
#include "trellis/reverse_producer_warps.cuh"
#include "trellis/reverse_state_warps.cuh"

namespace girih::kernels {

// HasOneTile: a chunk has at most one tile of 16 tokens.
template <typename T, int Width, class Phi, bool HasOneTile>
__global__ void __launch_bounds__(TrellisReverseStorage<T, Width>::kThreads, 1)
    trellis_reverse_kernel(const __grid_constant__ TrellisReverse p) {
  using Storage = TrellisReverseStorage<T, Width>;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const Storage storage{Width == 64 ? pin_address(shared) : shared};
  const TrellisBlockCoord coord(p.shape, blockIdx.x);
  const int warp = warp_index();
  storage.init_barriers(HasOneTile ? 1 : Storage::kOutputWarps);
  if (threadIdx.x == 0) storage.init_sources(p, coord);
  __syncthreads();
  // With a width of 128 the state warps and the output warps need the registers that producer warps and the
  // load warp do not use.
  constexpr bool kUseSetmaxnreg = Width > 64;
  constexpr int kStateRegisters = 160, kOutputRegisters = 136, kOtherRegisters = 56;
  static_assert(!kUseSetmaxnreg ||
                fit_registers(Storage::kThreads, {{Storage::kStateWarps / 4, kStateRegisters},
                                                  {Storage::kOutputWarps / 4, kOutputRegisters},
                                                  {1, kOtherRegisters}}));
  if (warp < Storage::kStateWarps) {
    if (kUseSetmaxnreg) setmaxnreg_inc<kStateRegisters>();
    run_reverse_state_warp<T, Width, Phi, HasOneTile>(p, coord, storage, warp);
  } else if (warp < Storage::kStateWarps + Storage::kOutputWarps) {
    if (kUseSetmaxnreg) setmaxnreg_inc<kOutputRegisters>();
    TrellisReverseOutputWarp<T, Width, HasOneTile>{p, coord, storage}.run(warp - Storage::kStateWarps);
  } else {
    if (kUseSetmaxnreg) setmaxnreg_dec<kOtherRegisters>();
    const int producer = warp - Storage::kStateWarps - Storage::kOutputWarps;
    if (producer < Storage::kProducerWarps) {
      TrellisReverseProducerWarp<T, Width, HasOneTile, Phi::has_weight>{p, coord, storage}.run(producer);
    } else {
      load_memories<T, Width>(p, coord, storage);
    }
  }
}

template <typename T, int Width, class Phi>
cudaError_t launch_reverse_instance(const TrellisReverse& p, cudaStream_t stream) {
  using Storage = TrellisReverseStorage<T, Width>;
  constexpr int kBytes = Phi::has_weight ? Storage::kWeightedBytes : Storage::kBytes;
  return p.shape.grid.size <= kTokenTile
             ? launch_memory_blocks<trellis_reverse_kernel<T, Width, Phi, true>, Storage, kBytes>(p, stream)
             : launch_memory_blocks<trellis_reverse_kernel<T, Width, Phi, false>, Storage, kBytes>(p, stream);
}
template <typename T, int Width>
cudaError_t launch_trellis_reverse(const TrellisReverse& p, cudaStream_t stream) {
  return p.shape.phi.norm == Norm::softmax
             ? launch_reverse_instance<T, Width, ActivationMap<true>>(p, stream)
             : launch_reverse_instance<T, Width, ActivationMap<false>>(p, stream);
}

}  // namespace girih::kernels

// Separate translation unit, so that the kernels are not instantiated here.
#include <algorithm>

#include "lattice/dkv.cuh"
#include "lattice/read.cuh"
#include "lattice/read_backward_memory.cuh"
#include "lattice/reverse.cuh"
#include "lattice/scan_short.cuh"

namespace girih::kernels {

cudaError_t lattice_fits(const LatticeShape& shape, bool& fits) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return lattice::dispatch_size(shape, [&](auto tokens, auto D, auto M) {
    using namespace lattice;
    using S = Sizes<__half, tokens(), D(), M()>;  // the same sizes as bf16
    const int resume_bytes = shape.grid.position == nullptr ? 0 : IntraChunk<S>::kResumedBytes;
    fits = std::max({ScanStorage<S>::kBytes, ReadTiles<S>::kBytes + resume_bytes,
                     ReadBackward<S>::kBytes + resume_bytes, ReverseStorage<S>::kBytes,
                     DkvBlock<S>::kBytes}) <= limit;
    return cudaSuccess;
  });
}

cudaError_t lattice_uses_short_scan(const LatticeShape& shape, bool& is) {
  return lattice::uses_short_scan(shape, is);
}

}  // namespace girih::kernels

// Separate translation unit, so that the kernels are not instantiated here.
#include <algorithm>

#include "lattice/columns.cuh"
#include "lattice/read.cuh"
#include "lattice/reads_memory.cuh"
#include "lattice/reverse.cuh"
#include "lattice/scan_short.cuh"

namespace girih::kernels {

cudaError_t lattice_fits(const LatticeShape& shape, bool& fits) {
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return lattice::by_size(shape, [&](auto tokens, auto D, auto M) {
    using namespace lattice;
    using S = Sizes<__half, tokens(), D(), M()>;  // the same sizes as bf16
    const int more = shape.grid.position == nullptr ? 0 : Within<S>::kResumedBytes;
    fits = std::max({ScanSpace<S>::kBytes, ReadTiles<S>::kBytes + more, Reads<S>::kBytes + more,
                     ReverseSpace<S>::kBytes, Columns<S>::kBytes}) <= limit;
    return cudaSuccess;
  });
}

cudaError_t lattice_is_short(const LatticeShape& shape, bool& is) { return lattice::is_short(shape, is); }

}  // namespace girih::kernels

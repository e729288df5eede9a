// Shared memory of the kernels, compared with the limit of the device. Separate translation unit, so that the
// kernels are not instantiated here.
#include <algorithm>

#include "lattice/dkv.cuh"
#include "lattice/read.cuh"
#include "lattice/read_backward_memory.cuh"
#include "lattice/reverse.cuh"
#include "lattice/reverse_short.cuh"
#include "lattice/scan.cuh"
#include "lattice/scan_short.cuh"

namespace girih::kernels {
namespace lattice {
namespace {

// Whether a short kernel of `bytes` of shared memory serves the chunks, the memory and the device.
cudaError_t fits_short(const LatticeShape& shape, int bytes, bool& fits) {
  int limit = 0;
  GIRIH_TRY(shared_limit(limit));
  fits = shape.grid.size <= 16 && shape.D <= 64 && shape.M <= 64 && bytes <= limit;
  return cudaSuccess;
}

}  // namespace

cudaError_t uses_short_scan(const LatticeShape& shape, bool& is_short) {
  constexpr auto kAny = LatticeObjective::decode;
  using Ring = ShortScanRing<__half, kAny, false>;  // the larger ring of the two
  static_assert(ShortScanRing<__half, kAny, true>::kBytes <= Ring::kBytes);
  return fits_short(shape, Ring::kBytes, is_short);
}

cudaError_t uses_short_reverse(const LatticeShape& shape, bool& is_short) {
  return fits_short(shape, ShortReverseRing<__half>::kBytes, is_short);  // the same bytes as bf16
}

}  // namespace lattice

cudaError_t lattice_fits(const LatticeShape& shape, bool& fits) {
  int limit = 0;
  GIRIH_TRY(shared_limit(limit));
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

}  // namespace girih::kernels

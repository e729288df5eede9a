// Chooses the kernel of a call.
#include "lattice/lattice.h"
#include "lattice/launch.h"

namespace girih::kernels {

cudaError_t lattice_forward(const LatticeScan& p, const LatticeRead& read, cudaStream_t stream) {
  return by_short_element(
      p.shape.dtype, [&](auto element) { return lattice::forward_of<decltype(element)>(p, read, stream); });
}
cudaError_t lattice_reads(const LatticeReads& p, cudaStream_t stream) {
  return by_short_element(p.shape.dtype,
                          [&](auto element) { return lattice::reads_of<decltype(element)>(p, stream); });
}
cudaError_t lattice_reverse(const LatticeReverse& p, const LatticeColumns& columns, cudaStream_t stream) {
  return by_short_element(p.shape.dtype, [&](auto element) {
    return lattice::reverse_of<decltype(element)>(p, columns, stream);
  });
}

}  // namespace girih::kernels

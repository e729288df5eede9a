// Chooses the kernel of a call.
#include "lattice/lattice.h"
#include "lattice/launch.h"

namespace girih::kernels {

cudaError_t lattice_forward(const LatticeScan& p, const LatticeRead& read, cudaStream_t stream) {
  return dispatch_16bit(p.shape.dtype, [&](auto element) {
    return lattice::launch_forward<decltype(element)>(p, read, stream);
  });
}
cudaError_t lattice_read_backward(const LatticeReadBackward& p, cudaStream_t stream) {
  return dispatch_16bit(p.shape.dtype, [&](auto element) {
    return lattice::launch_read_backward<decltype(element)>(p, stream);
  });
}
cudaError_t lattice_reverse(const LatticeReverse& p, const LatticeDkv& columns, cudaStream_t stream) {
  return dispatch_16bit(p.shape.dtype, [&](auto element) {
    return lattice::launch_reverse<decltype(element)>(p, columns, stream);
  });
}

}  // namespace girih::kernels

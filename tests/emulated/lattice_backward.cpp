// The backward launches of lattice.cpp in a separate translation unit, which compiles in parallel.
#include "call.h"
#include "lattice/dkv.cuh"
#include "lattice/read_backward_memory.cuh"
#include "lattice/reverse_short.cuh"

namespace girih::kernels::lattice {

template cudaError_t launch_read_backward<__nv_bfloat16>(const LatticeReadBackward&, cudaStream_t);
template cudaError_t launch_reverse<__nv_bfloat16>(const LatticeReverse&, const LatticeDkv&, cudaStream_t);
template cudaError_t launch_dkv<__nv_bfloat16>(const LatticeDkv&, cudaStream_t);

}  // namespace girih::kernels::lattice

bool uses_short_reverse(const girih::kernels::LatticeShape& shape) {
  bool is_short = false;
  check_launch(girih::kernels::lattice::uses_short_reverse<__nv_bfloat16>(shape, is_short));
  return is_short;
}

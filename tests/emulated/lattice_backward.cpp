// Of lattice.cpp what can be compiled beside it.
#include "call.h"
#include "lattice/dkv.cuh"
#include "lattice/read_backward_memory.cuh"
#include "lattice/reverse_short.cuh"

namespace girih::kernels::lattice {

template cudaError_t launch_read_backward<__nv_bfloat16>(const LatticeReadBackward&, cudaStream_t);
template cudaError_t launch_reverse<__nv_bfloat16>(const LatticeReverse&, const LatticeDkv&, cudaStream_t);
template cudaError_t launch_dkv<__nv_bfloat16>(const LatticeDkv&, cudaStream_t);

}  // namespace girih::kernels::lattice

bool is_short_in_reverse(const girih::kernels::LatticeShape& shape) {
  bool takes = false;
  must(girih::kernels::lattice::uses_short_reverse<__nv_bfloat16>(shape, takes));
  return takes;
}

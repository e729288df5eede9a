// Of lattice.cpp what can be compiled beside it.
#include "call.h"
#include "lattice/columns.cuh"
#include "lattice/reads_memory.cuh"
#include "lattice/reverse_short.cuh"

namespace girih::kernels::lattice {

template cudaError_t reads_of<__nv_bfloat16>(const LatticeReads&, cudaStream_t);
template cudaError_t reverse_of<__nv_bfloat16>(const LatticeReverse&, const LatticeColumns&, cudaStream_t);
template cudaError_t columns_of<__nv_bfloat16>(const LatticeColumns&, cudaStream_t);

}  // namespace girih::kernels::lattice

bool is_short_in_reverse(const girih::kernels::LatticeShape& shape) {
  bool takes = false;
  must(girih::kernels::lattice::takes_short<__nv_bfloat16>(shape, takes));
  return takes;
}

#include "lattice/reverse_short.cuh"

namespace girih::kernels::lattice {

template cudaError_t reverse_of<__nv_bfloat16>(const LatticeReverse&, const LatticeColumns&, cudaStream_t);

}  // namespace girih::kernels::lattice

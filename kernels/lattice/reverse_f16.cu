#include "lattice/reverse.cuh"

namespace girih::kernels::lattice {

template cudaError_t reverse_of<__half>(const LatticeReverse&, cudaStream_t);

}  // namespace girih::kernels::lattice

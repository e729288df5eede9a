#include "lattice/read.cuh"

namespace girih::kernels::lattice {

template cudaError_t read_of<__half>(const LatticeRead&, cudaStream_t);

}  // namespace girih::kernels::lattice

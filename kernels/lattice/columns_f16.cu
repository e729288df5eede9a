#include "lattice/columns.cuh"

namespace girih::kernels::lattice {

template cudaError_t columns_of<__half>(const LatticeColumns&, cudaStream_t);

}  // namespace girih::kernels::lattice

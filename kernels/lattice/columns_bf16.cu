#include "lattice/columns.cuh"

namespace girih::kernels::lattice {

template cudaError_t columns_of<__nv_bfloat16>(const LatticeColumns&, cudaStream_t);

}  // namespace girih::kernels::lattice

#include "lattice/reads_memory.cuh"

namespace girih::kernels::lattice {

template cudaError_t reads_of<__nv_bfloat16>(const LatticeReads&, cudaStream_t);

}  // namespace girih::kernels::lattice

#include "lattice/scan_short.cuh"

namespace girih::kernels::lattice {

template cudaError_t forward_of<__nv_bfloat16>(const LatticeScan&, const LatticeRead&, cudaStream_t);

}  // namespace girih::kernels::lattice

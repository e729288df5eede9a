#include "lattice/scan.cuh"

namespace girih::kernels::lattice {

template cudaError_t scan_of<__nv_bfloat16>(const LatticeScan&, cudaStream_t);

}  // namespace girih::kernels::lattice

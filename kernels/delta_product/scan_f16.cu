#include "delta_product/scan.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_scan<__half, 64>(const ScanPass&, cudaStream_t);
template cudaError_t launch_scan<__half, 128>(const ScanPass&, cudaStream_t);
template cudaError_t launch_scan<__half, 256>(const ScanPass&, cudaStream_t);

}  // namespace girih::kernels::delta_product

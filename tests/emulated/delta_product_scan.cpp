// launch_scan() of delta_product.cpp in a separate translation unit, which compiles in parallel.
#include "delta_product/scan.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_scan<__nv_bfloat16, 64>(const ScanParams&, cudaStream_t);
template cudaError_t launch_scan<__nv_bfloat16, 128>(const ScanParams&, cudaStream_t);
template cudaError_t launch_scan<__nv_bfloat16, 256>(const ScanParams&, cudaStream_t);
template cudaError_t launch_scan<__half, 64>(const ScanParams&, cudaStream_t);

}  // namespace girih::kernels::delta_product

#include "delta_product/reverse.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_reverse<__half, 64>(const ReversePass&, cudaStream_t);
template cudaError_t launch_reverse<__half, 128>(const ReversePass&, cudaStream_t);
template cudaError_t launch_reverse<__half, 256>(const ReversePass&, cudaStream_t);

}  // namespace girih::kernels::delta_product

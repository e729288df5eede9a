// launch_reverse() of delta_product.cpp in a separate translation unit, which compiles in parallel.
#include "delta_product/reverse.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_reverse<__nv_bfloat16, 64>(const ReverseParams&, cudaStream_t);
template cudaError_t launch_reverse<__nv_bfloat16, 128>(const ReverseParams&, cudaStream_t);
template cudaError_t launch_reverse<__nv_bfloat16, 256>(const ReverseParams&, cudaStream_t);
template cudaError_t launch_reverse<__half, 64>(const ReverseParams&, cudaStream_t);

}  // namespace girih::kernels::delta_product

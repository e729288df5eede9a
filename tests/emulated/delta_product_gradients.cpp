// launch_gradients() of delta_product.cpp in a separate translation unit, which compiles in parallel.
#include "delta_product/gradients.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_gradients<__nv_bfloat16, 64>(const DeltaGradients&, cudaStream_t);
template cudaError_t launch_gradients<__nv_bfloat16, 128>(const DeltaGradients&, cudaStream_t);
template cudaError_t launch_gradients<__nv_bfloat16, 256>(const DeltaGradients&, cudaStream_t);
template cudaError_t launch_gradients<__half, 64>(const DeltaGradients&, cudaStream_t);

}  // namespace girih::kernels::delta_product

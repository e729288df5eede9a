#include "delta_product/gradients.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_gradients<__half, 64>(const DeltaGradients&, cudaStream_t);
template cudaError_t launch_gradients<__half, 128>(const DeltaGradients&, cudaStream_t);
template cudaError_t launch_gradients<__half, 256>(const DeltaGradients&, cudaStream_t);

}  // namespace girih::kernels::delta_product

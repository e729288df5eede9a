#include "delta_product/vector_gradients.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_vector_gradients<__half, 64>(const DeltaVectorGradients&, cudaStream_t);
template cudaError_t launch_vector_gradients<__half, 128>(const DeltaVectorGradients&, cudaStream_t);

}  // namespace girih::kernels::delta_product

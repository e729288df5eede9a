#include "delta_product/vector_gradients.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_vector_gradients<__nv_bfloat16, 64>(const DeltaVectorGradients&, cudaStream_t);
template cudaError_t launch_vector_gradients<__nv_bfloat16, 128>(const DeltaVectorGradients&, cudaStream_t);

}  // namespace girih::kernels::delta_product

#include "cat_attention/query_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_query_gradients<__half, 64>(const CatQueryGradients&, cudaStream_t);
template cudaError_t launch_cat_query_gradients<__half, 128>(const CatQueryGradients&, cudaStream_t);
template cudaError_t launch_cat_query_gradients<__half, 256>(const CatQueryGradients&, cudaStream_t);

}  // namespace girih::kernels

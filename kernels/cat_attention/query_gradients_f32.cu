#include "cat_attention/query_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_query_gradients<float, 64>(const CatQueryGradients&, cudaStream_t);
template cudaError_t launch_cat_query_gradients<float, 128>(const CatQueryGradients&, cudaStream_t);

}  // namespace girih::kernels

#include "cat_attention/own_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_own_gradients<__half, 64>(const CatOwnGradients&, cudaStream_t);
template cudaError_t launch_cat_own_gradients<__half, 128>(const CatOwnGradients&, cudaStream_t);
template cudaError_t launch_cat_own_gradients<__half, 256>(const CatOwnGradients&, cudaStream_t);

}  // namespace girih::kernels

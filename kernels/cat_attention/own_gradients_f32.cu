#include "cat_attention/own_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_own_gradients<float, 64>(const CatOwnGradients&, cudaStream_t);
template cudaError_t launch_cat_own_gradients<float, 128>(const CatOwnGradients&, cudaStream_t);

}  // namespace girih::kernels

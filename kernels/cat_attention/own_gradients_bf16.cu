#include "cat_attention/own_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_own_gradients<__nv_bfloat16, 64>(const CatOwnGradients&, cudaStream_t);
template cudaError_t launch_cat_own_gradients<__nv_bfloat16, 128>(const CatOwnGradients&, cudaStream_t);
template cudaError_t launch_cat_own_gradients<__nv_bfloat16, 256>(const CatOwnGradients&, cudaStream_t);

}  // namespace girih::kernels

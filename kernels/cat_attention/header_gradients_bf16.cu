#include "cat_attention/header_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_header_gradients<__nv_bfloat16, 64>(const CatHeaderGradients&, cudaStream_t);
template cudaError_t launch_cat_header_gradients<__nv_bfloat16, 128>(const CatHeaderGradients&, cudaStream_t);
template cudaError_t launch_cat_header_gradients<__nv_bfloat16, 256>(const CatHeaderGradients&, cudaStream_t);

}  // namespace girih::kernels

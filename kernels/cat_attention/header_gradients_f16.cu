#include "cat_attention/header_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_header_gradients<__half, 64>(const CatHeaderGradients&, cudaStream_t);
template cudaError_t launch_cat_header_gradients<__half, 128>(const CatHeaderGradients&, cudaStream_t);
template cudaError_t launch_cat_header_gradients<__half, 256>(const CatHeaderGradients&, cudaStream_t);

}  // namespace girih::kernels

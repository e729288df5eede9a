#include "cat_attention/header_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_header_gradients<float, 64>(const CatHeaderGradients&, cudaStream_t);
template cudaError_t launch_cat_header_gradients<float, 128>(const CatHeaderGradients&, cudaStream_t);

}  // namespace girih::kernels

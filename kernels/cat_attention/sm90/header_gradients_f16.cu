#include "cat_attention/sm90/header_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_group_header_gradients<__half, 64>(const CatHeaderGradients&, cudaStream_t);
template cudaError_t launch_cat_group_header_gradients<__half, 128>(const CatHeaderGradients&, cudaStream_t);
template cudaError_t has_cat_group_headers<__half, 64>(bool&);
template cudaError_t has_cat_group_headers<__half, 128>(bool&);

}  // namespace girih::kernels

#include "cat_attention/sm90/header_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_group_header_gradients<__nv_bfloat16, 64>(const CatHeaderGradients&,
                                                                          cudaStream_t);
template cudaError_t launch_cat_group_header_gradients<__nv_bfloat16, 128>(const CatHeaderGradients&,
                                                                           cudaStream_t);
template cudaError_t has_cat_group_headers<__nv_bfloat16, 64>(bool&);
template cudaError_t has_cat_group_headers<__nv_bfloat16, 128>(bool&);

}  // namespace girih::kernels

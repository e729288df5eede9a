#include "cat_attention/sm90/join.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_join<__nv_bfloat16, 64>(const CatOwnGradients&, cudaStream_t);
template cudaError_t launch_cat_join<__nv_bfloat16, 128>(const CatOwnGradients&, cudaStream_t);

}  // namespace girih::kernels

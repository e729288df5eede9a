#include "cat_attention/forward.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_forward<__nv_bfloat16, 64>(const CatForward&, cudaStream_t);
template cudaError_t launch_cat_forward<__nv_bfloat16, 128>(const CatForward&, cudaStream_t);
template cudaError_t launch_cat_forward<__nv_bfloat16, 256>(const CatForward&, cudaStream_t);

}  // namespace girih::kernels

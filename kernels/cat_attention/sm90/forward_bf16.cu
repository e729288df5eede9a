#include "cat_attention/sm90/forward.cuh"

namespace girih::kernels {

template cudaError_t try_cat_group_forward<__nv_bfloat16, 64>(const CatForward&, cudaStream_t, bool&);
template cudaError_t try_cat_group_forward<__nv_bfloat16, 128>(const CatForward&, cudaStream_t, bool&);

}  // namespace girih::kernels

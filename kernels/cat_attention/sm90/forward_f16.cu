#include "cat_attention/sm90/forward.cuh"

namespace girih::kernels {

template cudaError_t try_cat_group_forward<__half, 64>(const CatForward&, cudaStream_t, bool&);
template cudaError_t try_cat_group_forward<__half, 128>(const CatForward&, cudaStream_t, bool&);

}  // namespace girih::kernels

#include "cat_attention/forward.cuh"

namespace girih::kernels {

template cudaError_t launch_cat_forward<float, 64>(const CatForward&, cudaStream_t);
template cudaError_t launch_cat_forward<float, 128>(const CatForward&, cudaStream_t);

}  // namespace girih::kernels

#include "gla/head_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_head_gradients<__nv_bfloat16, 64>(const HeadGradients&, cudaStream_t);
template cudaError_t launch_head_gradients<__nv_bfloat16, 128>(const HeadGradients&, cudaStream_t);

}  // namespace girih::kernels

#include "gla/head_gradients.cuh"

namespace girih::kernels {

template cudaError_t launch_head_gradients<__half, 64>(const HeadGradients&, cudaStream_t);
template cudaError_t launch_head_gradients<__half, 128>(const HeadGradients&, cudaStream_t);

}  // namespace girih::kernels

#include "gla/head_read.cuh"

namespace girih::kernels {

template cudaError_t launch_head_read<__half, 64, false>(HeadPass, cudaStream_t);
template cudaError_t launch_head_read<__half, 64, true>(HeadPass, cudaStream_t);
template cudaError_t launch_head_read<__half, 128, false>(HeadPass, cudaStream_t);
template cudaError_t launch_head_read<__half, 128, true>(HeadPass, cudaStream_t);
template cudaError_t launch_head_read<__half, 256, false>(HeadPass, cudaStream_t);
template cudaError_t launch_head_read<__half, 256, true>(HeadPass, cudaStream_t);

}  // namespace girih::kernels

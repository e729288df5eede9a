#include "gla/output.cuh"

namespace girih::kernels {

template cudaError_t launch_gla_output<__half, 64>(const GlaOutput&, cudaStream_t);
template cudaError_t launch_gla_output<__half, 128>(const GlaOutput&, cudaStream_t);

}  // namespace girih::kernels

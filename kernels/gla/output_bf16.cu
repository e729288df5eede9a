#include "gla/output.cuh"

namespace girih::kernels {

template cudaError_t launch_gla_output<__nv_bfloat16, 64>(const GlaOutput&, cudaStream_t);
template cudaError_t launch_gla_output<__nv_bfloat16, 128>(const GlaOutput&, cudaStream_t);

}  // namespace girih::kernels

#include "gla/columns.cuh"

namespace girih::kernels {

template cudaError_t launch_gla_columns<__nv_bfloat16, 64>(const GlaColumns&, cudaStream_t);
template cudaError_t launch_gla_columns<__nv_bfloat16, 128>(const GlaColumns&, cudaStream_t);

}  // namespace girih::kernels

#include "gla/columns.cuh"

namespace girih::kernels {

template cudaError_t launch_gla_columns<__half, 64>(const GlaColumns&, cudaStream_t);
template cudaError_t launch_gla_columns<__half, 128>(const GlaColumns&, cudaStream_t);

}  // namespace girih::kernels

#include "gla/rows.cuh"

namespace girih::kernels {

template cudaError_t launch_gla_rows<__half, 64>(const GlaRows&, cudaStream_t);
template cudaError_t launch_gla_rows<__half, 128>(const GlaRows&, cudaStream_t);

}  // namespace girih::kernels

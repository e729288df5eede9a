#include "gsa/output.cuh"

namespace girih::kernels {

template cudaError_t launch_gsa_output<__half, 64>(const GsaOutput&, cudaStream_t);
template cudaError_t launch_gsa_output<__half, 128>(const GsaOutput&, cudaStream_t);

}  // namespace girih::kernels

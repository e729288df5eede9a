#include "gsa/output.cuh"

namespace girih::kernels {

template cudaError_t launch_gsa_output<__nv_bfloat16, 64>(const GsaOutput&, cudaStream_t);
template cudaError_t launch_gsa_output<__nv_bfloat16, 128>(const GsaOutput&, cudaStream_t);

}  // namespace girih::kernels

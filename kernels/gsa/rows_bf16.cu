#include "gsa/rows.cuh"

namespace girih::kernels {

template cudaError_t launch_gsa_rows<__nv_bfloat16, 64>(const GsaRows&, cudaStream_t);
template cudaError_t launch_gsa_rows<__nv_bfloat16, 128>(const GsaRows&, cudaStream_t);

}  // namespace girih::kernels

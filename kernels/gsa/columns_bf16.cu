#include "gsa/columns.cuh"

namespace girih::kernels {

template cudaError_t launch_gated_columns<__nv_bfloat16, 64, 2>(const GatedColumns&, cudaStream_t);
template cudaError_t launch_gated_columns<__nv_bfloat16, 128, 2>(const GatedColumns&, cudaStream_t);

}  // namespace girih::kernels

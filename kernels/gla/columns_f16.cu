#include "gsa/columns.cuh"

namespace girih::kernels {

template cudaError_t launch_gated_columns<__half, 64, 1>(const GatedColumns&, cudaStream_t);
template cudaError_t launch_gated_columns<__half, 128, 1>(const GatedColumns&, cudaStream_t);

}  // namespace girih::kernels

#include "gsa/columns.cuh"

namespace girih::kernels {

template cudaError_t launch_gsa_columns<__half, 64>(const GsaColumns&, cudaStream_t);
template cudaError_t launch_gsa_columns<__half, 128>(const GsaColumns&, cudaStream_t);

}  // namespace girih::kernels

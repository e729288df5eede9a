#include "trellis/columns.cuh"
#include "trellis/launch.h"

namespace girih::kernels {

template cudaError_t launch_trellis_columns<__nv_bfloat16, 64>(const TrellisColumns&, cudaStream_t);
template cudaError_t launch_trellis_columns<__nv_bfloat16, 128>(const TrellisColumns&, cudaStream_t);

}  // namespace girih::kernels

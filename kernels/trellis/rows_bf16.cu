#include "trellis/launch.h"
#include "trellis/rows.cuh"

namespace girih::kernels {

template cudaError_t launch_trellis_rows<__nv_bfloat16, 64>(const TrellisRows&, cudaStream_t);
template cudaError_t launch_trellis_rows<__nv_bfloat16, 128>(const TrellisRows&, cudaStream_t);

}  // namespace girih::kernels

#include "trellis/launch.h"
#include "trellis/output.cuh"

namespace girih::kernels {

template cudaError_t launch_trellis_output<__nv_bfloat16, 64>(const TrellisOutput&, cudaStream_t);
template cudaError_t launch_trellis_output<__nv_bfloat16, 128>(const TrellisOutput&, cudaStream_t);

}  // namespace girih::kernels

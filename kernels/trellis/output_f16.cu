#include "trellis/launch.h"
#include "trellis/output.cuh"

namespace girih::kernels {

template cudaError_t launch_trellis_output<__half, 64>(const TrellisOutput&, cudaStream_t);
template cudaError_t launch_trellis_output<__half, 128>(const TrellisOutput&, cudaStream_t);

}  // namespace girih::kernels
